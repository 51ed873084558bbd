"""Find an inference engine that runs in a trainer's process, and what it has allocated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from memprof.compat.trl import VLLM
from memprof.vocabulary import Category

_PACKAGE = "vllm"
# How far from the runner its buffers are looked for.
_DEPTH = 5
# From vLLM's LLM, or its engine, to what runs the model; TRL sends its weights by the same path.
_TO_RUNNER = ("llm_engine", "model_executor", "driver_worker", "model_runner")


def engine_of(trainer: Any) -> Any:
    """Return the vLLM that a trainer of TRL's or ms-swift's generates with, if it runs in this process; else None."""
    for holder, name in (
        (VLLM.of(trainer), "llm"),
        (trainer, "llm"),
        (getattr(trainer, "engine", None), "engine"),  # ms-swift's
    ):
        if (engine := getattr(holder, name, None)) is not None:
            return engine
    return None


def server_note(trainer: Any, redact: bool) -> str | None:
    """Return a note on the vLLM server that a trainer generates with; None if it uses none.

    ``redact``: leave its address out.
    """
    args = trainer.args
    if not getattr(args, "use_vllm", False) or getattr(args, "vllm_mode", None) != "server":
        return None
    given = getattr(args, "vllm_server_base_url", None)
    host, port = getattr(args, "vllm_server_host", ""), getattr(args, "vllm_server_port", "")
    parts = urlsplit(given if isinstance(given, str) else f"http://{host}:{port}")
    address = "" if redact else f" at {parts.scheme}://{parts.netloc.rpartition('@')[2]}"  # no user name and password
    device = getattr(getattr(args, "device", None), "type", "")
    used = " What it uses of this GPU is in the row Other processes, if NVML can be read." if device == "cuda" else ""
    return (
        f"Completions come from another process, the vLLM server{address}: its memory is not in this recording.{used} "
        'memprof.attach(role="rollout") in its worker records it, and memprof.request_dump writes it: '
        "docs/frameworks.md, vLLM."
    )


def runner_of(engine: Any) -> Any:
    """Return the model runner of a vLLM; None for other objects, and if its model runs in another process.

    ``engine``: an ``LLM``, its engine, one of its workers, or a runner.
    """
    if hasattr(engine, "kv_caches") and hasattr(engine, "model"):
        return engine
    if (runner := getattr(engine, "model_runner", None)) is not None:
        return runner
    for name in _TO_RUNNER:
        engine = getattr(engine, name, engine if name == _TO_RUNNER[0] else None)
    return engine


def engine_parts(runner: Any) -> Iterator[tuple[str, Any, Category]]:
    """Yield name, tensor and category of an engine's KV cache, parameters and buffers, those of its runner included."""
    import torch

    for index, part in enumerate(getattr(runner, "kv_caches", None) or []):
        for tensor in part if isinstance(part, (list, tuple)) else [part]:
            if isinstance(tensor, torch.Tensor):
                yield f"kv_caches.{index}", tensor, Category.KV_CACHE
    model = getattr(runner, "model", None)
    if isinstance(model, torch.nn.Module):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            yield name, tensor, Category.INFERENCE_ENGINE
    for name, tensor in _tensors_below(runner):
        yield name, tensor, Category.INFERENCE_ENGINE


def _tensors_below(runner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors that a runner, and the engine's objects and containers it has, refer to: their buffers."""
    import torch

    seen: set[int] = set()
    level = [(n, value) for n, value in list(vars(runner).items()) if "config" not in n and n != "kv_caches"]
    for _ in range(_DEPTH):
        below: list[tuple[str, Any]] = []
        for name, value in level:
            if id(value) in seen or isinstance(value, torch.nn.Module):
                continue
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                yield name, value
            elif isinstance(value, dict):
                below += [(name, item) for item in list(value.values())]
            elif isinstance(value, (list, tuple)):
                below += [(name, item) for item in value]
            elif type(value).__module__.partition(".")[0] == _PACKAGE and not isinstance(value, type):
                held = getattr(value, "__dict__", {})
                below += [(f"{name}.{key}", item) for key, item in list(held.items()) if "config" not in key]
        level = below
