"""Find an inference engine that runs in a trainer's process, and what it has allocated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memprof.compat.trl import VLLM
from memprof.vocabulary import Category

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


def runner_of(engine: Any) -> Any:
    """Return vLLM's model runner; None if the engine is another one, or runs its model in another process."""
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
    for name, value in list(getattr(runner, "__dict__", {}).items()):
        # Its buffers are pairs of a host and a device tensor.
        for tensor in (value, getattr(value, "cpu", None), getattr(value, "gpu", None)):
            if isinstance(tensor, torch.Tensor):
                yield name, tensor, Category.INFERENCE_ENGINE
