"""What is known of one failure, by the names that the knowledge files use."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from memprof.allocator.settings import AllocatorSettings
from memprof.oom.arithmetic import Parts, free_bytes, missing_bytes
from memprof.oom.expressions import Scope
from memprof.oom.failure import Failure, Frame
from memprof.oom.frameworks import PLAIN, Names
from memprof.oom.tables import table
from memprof.units import GIB

__all__ = ["scope_of", "scope_of_recording"]

# As torch comes; a message does not say what was set.
_ALLOCATOR = AllocatorSettings()
_INNER = 6
# What torch's own message proposes is not what was set.
_PROPOSED = re.compile(
    r"try\s{1,4}setting\s{1,4}\S{1,80}|use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0\.0|consider \S{1,80}"
    r"|please set \S{1,80}",
    re.I,
)
_TORCH = re.compile(r"\b(?:py)?torch(?: version)?(?:==|[ :=@v-]{1,3})(\d)\.(\d{1,2})(?!\d)", re.I)


def scope_of(failure: Failure, parts: Parts, phase: str | None, logits: bool, names: Names) -> Scope:
    """Return the numbers, flags, settings' names and functions that conditions and templates may ask for."""
    surroundings = _PROPOSED.sub(" ", f"{failure.head}\n{failure.around}")
    values = {
        **failure.facts,
        **_numbers(failure, parts),
        **{f"setting_{word}": text for word, text in {**PLAIN.words, **names.words}.items()},
        "form": failure.form.id,
        "kind": failure.kind,
        "program": failure.form.program,
        "backend": failure.backend,
        "phase": phase,
        "logits": logits,
        "rank": failure.rank,
        "framework": names.framework or None,
        "framework_kind": names.kind if names.framework else None,
        "engine_sleeps": names.sleeps,
        "torch": _version("\n".join([*map(_place, failure.frames), failure.text, surroundings])),
        "torch_most": _oldest_wording(failure),
    }
    if names.framework:  # another framework's words would be foreign to it
        own = {f"setting_{word}" for word in (*names.words, "micro_batch", "checkpointing", "optimizer", "offload")}
        values = {k: v for k, v in values.items() if not k.startswith("setting_") or k in own}
    if failure.kind != "device":
        values.update({name: failure.facts[name] for name in ("total", "free") if name in failure.facts})
    functions = _functions(failure.frames, failure.text, surroundings, values)
    flags = table("flags")["flag"]
    told = Scope({**values, "total": failure.total}, functions).within(flags)
    return Scope({**values, **{name: told[name] for name in flags}}, functions)


def scope_of_recording(names: Names, phase: str, training: bool, alloc_conf: str = "", **more: Any) -> Scope:
    """Return what a recording tells a change; a setting that the framework has no word for is unknown.

    Args:
        names: the framework whose files the stacks show. An engine's settings say nothing of a training beside it.
        phase: the phase of the peak.
        training: gradients were seen.
        alloc_conf: the allocator's settings.
        more: what the change's own words ask for, such as ``held``, the bytes that it is about.
    """
    words = dict(names.words) if names.framework else dict(PLAIN.words)
    if names.kind == "serving":  # its word for checkpointing is about graphs
        words = {**words, **PLAIN.words} if training else {k: v for k, v in words.items() if k != "checkpointing"}
    values = {
        **{f"setting_{word}": text for word, text in words.items()},
        "backend": "CUDA",
        "framework": names.framework or None,
        "phase": phase,
        "training": training,
        "serving": names.kind == "serving" and not training,
        "images": names.kind == "images",
        "loading": phase == "load",
        "sleeping_engine": names.sleeps,
        "torch": None,
        "torch_most": None,
        **more,
    }
    return Scope(values, _functions((), "", alloc_conf, values))


def _numbers(failure: Failure, parts: Parts) -> dict[str, Any]:
    asked, allocated = failure.requested, parts.allocated
    return {
        **{k: v for k, v in asdict(parts).items() if k not in ("processes", "contradictions", "own_process")},
        "asked": asked,
        "total": failure.total,
        "free": free_bytes(failure),
        "allowed": failure.allowed,
        "other": failure.other,
        "private_pools": failure.private_pools,
        "missing": missing_bytes(failure),
        "idle": parts.cached or 0,
        "live": None if not failure.total or allocated is None else allocated / failure.total,
        "piece": None if asked is None else _ALLOCATOR.segment_size(_ALLOCATOR.round_size(asked)),
        "processes": len(parts.processes),
        "silent": sum(not held for _, held in parts.processes),
        "pid": parts.processes[0][0] if len(parts.processes) == 1 else failure.facts.get("pid"),
    }


def _version(text: str) -> int | None:
    match = _TORCH.search(text)
    return int(match[1]) * 100 + int(match[2]) if match else None


def _oldest_wording(failure: Failure) -> int | None:
    """Return the newest version that can word it so; None where any can."""
    if failure.backend not in ("CUDA", "HIP"):
        return None
    text = failure.text.lower()
    if "already allocated" in text:
        return 103 if "cached" in text else 200
    return 201 if "capacty" in text else None


def _place(frame: Frame) -> str:
    return f"{frame.path}:{frame.function}"


def _functions(
    frames: Sequence[Frame], message: str, surroundings: str, values: dict[str, Any]
) -> dict[str, Callable[..., Any]]:
    places = [_place(frame) for frame in frames]
    code = frames[-1].code if frames else ""

    def found(pattern: str, where: str) -> bool:
        return re.search(pattern, where) is not None

    def torch_before(major: int, minor: int) -> bool:
        known = values["torch"] or values["torch_most"]
        return known is not None and known < major * 100 + minor

    def text(pattern: str) -> str | None:
        match = re.search(pattern, f"{surroundings}\n{message}")
        return match[1] if match else None

    def number(pattern: str) -> float | None:
        match = text(pattern)
        return None if match is None else float(match)

    def join(*pieces: Any) -> str | None:
        return None if any(p is None for p in pieces) else "".join(str(p) for p in pieces)

    return {
        "known": lambda value: value is not None,
        "first": lambda *options: next((o for o in options if o is not None), None),
        "min": lambda *v: None if any(x is None for x in v) else min(v),
        "max": lambda *v: None if any(x is None for x in v) else max(v),
        "floor": lambda v: None if v is None else math.floor(v),
        "ceil": lambda v: None if v is None else math.ceil(v),
        "sqrt": lambda v: None if v is None else math.sqrt(v),
        "in_gib": lambda v: None if v is None else v / GIB if v > 1e6 else v,
        "join": join,
        "frames": lambda pattern: found(pattern, "\n".join(places)),
        "inner": lambda pattern: found(pattern, "\n".join(p.rpartition("/")[2] for p in places[-_INNER:])),
        "deep": lambda pattern, count: found(pattern, "\n".join(places[-int(count) :])),
        "said": lambda pattern: found(pattern, message),
        "seen": lambda pattern: found(pattern, "\n".join([*places, message, surroundings])),
        "code": lambda pattern: found(pattern, code),
        "code_line": lambda pattern: code.strip()[:90] if code and found(pattern, code) else None,
        "log": lambda pattern: found(pattern, f"{surroundings}\n{message}"),
        "set_in_log": lambda pattern: found(f"(?i){pattern}", surroundings),
        "torch_before": torch_before,
        "text": text,
        "number": number,
    }
