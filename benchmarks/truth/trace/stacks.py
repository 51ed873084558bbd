"""Turn the frames this machine saw into those of a GPU's history, and read what they say of an allocation."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import click
import torch

Frame = dict[str, "str | int"]
Raw = tuple[tuple[CodeType, int], ...]

# The checkout: the harness, and whatever else of memprof stands around the script (a wrapper that a test left behind).
_CHECKOUT = str(Path(__file__).resolve().parents[3])
_SCRIPTS = str(Path(__file__).parents[1] / "scripts")
# What runs a case from the command line stands outside the script.
_COMMAND = str(Path(click.__file__).parent)
_SITE = sysconfig.get_paths()["purelib"]
_STDLIB = sysconfig.get_paths()["stdlib"]
_ENVIRONMENT = sys.prefix  # may lie inside the checkout
_NOT_OURS = (_SCRIPTS, _ENVIRONMENT)
_MODULE = str(Path(torch.nn.modules.module.__file__))
# The dispatch mode's own machinery, innermost: not there on a GPU.
_PLUMBING = ("torch/_dynamo/eval_frame.py", "torch/_compile.py", "torch/utils/_python_dispatch.py", "weakref.py")

_SCORING = ("_get_per_token_logps_and_entropies", "_compute_loss", "compute_loss", "get_logps")


def _ours(code: CodeType) -> bool:
    name = code.co_filename
    return name.startswith(_COMMAND) or (name.startswith(_CHECKOUT) and not name.startswith(_NOT_OURS))


def _path(name: str) -> str:
    if name.startswith(_SITE):
        return "/opt/venv/lib/python3.11/site-packages" + name[len(_SITE):]
    if name.startswith(_SCRIPTS):
        return "/workspace" + name[len(_SCRIPTS):]
    return "/usr/lib/python3.11" + name[len(_STDLIB):] if name.startswith(_STDLIB) else name


def _trimmed(raw: Raw) -> list[tuple[CodeType, int]]:
    """Leave out the tracer's plumbing at the inner end, our wrappers, and what runs the script at the outer end."""
    start = 0
    while start < len(raw) and (_ours(raw[start][0]) or raw[start][0].co_filename.endswith(_PLUMBING)):
        start += 1
    out: list[tuple[CodeType, int]] = []
    for code, line in raw[start:]:
        if not _ours(code):
            out.append((code, line))
        if code.co_filename.startswith(_SCRIPTS) and code.co_name == "main":
            break
    return out


def public_frames(raw: Raw, op: str) -> list[Frame]:
    """Return frames as the snapshot holds them: inside backward only what the autograd thread's stack shows."""
    out: list[Frame] = []
    if op == "Module.to":
        out.append({"name": "convert", "filename": _path(_MODULE), "line": 1369})
    if op == "materialize":
        out.append({"name": "_materialize_copy", "line": 1323,
                    "filename": _path(_SITE + "/transformers/core_model_loading.py")})
    if op == "warmup":
        out.append({"name": "caching_allocator_warmup", "line": 5229,
                    "filename": _path(_SITE + "/transformers/modeling_utils.py")})
    for code, line in _trimmed(raw):
        if code.co_name == "_engine_run_backward":
            return out
        out.append({"name": code.co_name, "filename": _path(code.co_filename), "line": line})
    if out and str(out[-1]["filename"]).startswith("/workspace"):
        out.append({"name": "<module>", "filename": str(out[-1]["filename"]), "line": 1})
    return out


@dataclass(frozen=True)
class Context:
    """What a raw stack says about the moment of birth."""

    backward: bool
    recompute: bool
    in_module: bool
    in_logprob: bool
    between_modules: bool
    clip: bool
    optimizer: bool


def _forward_by_name(frames: list[tuple[CodeType, int]]) -> bool:
    """Tell whether a script runs a module's forward without calling the module."""
    return any(c.co_name == "forward" and c.co_filename.startswith(_SCRIPTS) for c, _ in frames)


def context_of(raw: Raw) -> Context:
    """Read the flags off the whole stack, before anything is cut from it."""
    frames = _trimmed(raw)
    names = [c.co_name for c, _ in frames]
    files = [c.co_filename for c, _ in frames]
    engine = names.index("_engine_run_backward") if "_engine_run_backward" in names else None
    inner = names[:engine] if engine is not None else names
    call = names.index("_call_impl") if "_call_impl" in names else None
    nearest = files[:call] if call is not None else files
    # The log-prob function is called by the patched model's forward: inside `__call__`, yet loss code.
    scoring = any(n in _SCORING for n in names)
    fused = any("/trl/" in f for f in nearest) and call is not None
    return Context(
        backward=engine is not None,
        recompute=any(n in ("recompute_fn", "unpack_hook", "_call_impl") for n in inner) and engine is not None,
        in_module=call is not None or _forward_by_name(frames),
        in_logprob=scoring,
        between_modules=fused,
        clip=any(f.endswith("clip_grad.py") for f in files),
        optimizer=any("/torch/optim/" in f for f in files),
    )
