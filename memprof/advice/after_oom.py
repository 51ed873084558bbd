"""Look ahead from an out-of-memory error: what the step still had to allocate, and what it would have needed in all.

The request that failed is seldom the last one. In an optimizer's first step most of the state may still be missing, in
a first backward the gradients and the state, in generation the rest of the cache. That they will be asked for follows
from the model, so that "it would have fitted in one piece" can be judged against the whole step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memprof.advice.recorded_run import Run, run_of
from memprof.config.model_shape import DTYPE_BYTES
from memprof.config.optimizers import optimizer
from memprof.config.settings import Settings

# What an optimizer's step finds: the rest of a pass is gone by then.
_GONE = {"activations", "activation_gradients", "loss_logits", "kv_cache", "temporaries", "weight_casts"}
_BEFORE_STEP = ("forward", "backward")
# A foreign run's optimizer is known where a frame names it: torch's Adam and AdamW keep two moments like the parameter.
_ADAM = ("adamw", "adam.py", "_adam")


def look_ahead(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """Estimate what the step that ran out of memory (a report's ``oom``) would have needed in all.

    Returns:
        ``still``: bytes yet to be made by category; ``moment``: the phase that needs most; ``needed_bytes``: allocated
        then, at least; ``available_bytes``: what torch could have had (None where the device's free bytes are not
        known); ``short_bytes``: what is missing of it. None where nothing is known to be ahead.
    """
    oom = report["oom"]
    held = oom.get("categories")
    if not held or not oom.get("allocated_bytes"):
        return None
    run = run_of(report)
    still = {name: n for name, n in _still(run, oom, held).items() if n > 0}
    if not still:
        return None
    moment, needed = _need(oom, held, still)
    available = _available(oom)
    return {
        "still": still,
        "moment": moment,
        "needed_bytes": needed,
        "available_bytes": available,
        "short_bytes": None if available is None else max(0, needed - available),
    }


def _still(run: Run, oom: Mapping[str, Any], held: Mapping[str, int]) -> dict[str, int]:
    """List what is yet to be made, by category; below zero or zero where it is all there."""
    phase = oom["phase"]
    if phase == "generate":
        return {"kv_cache": _whole_cache(run) - held.get("kv_cache", 0)}
    if phase == "optimizer_step":
        gradients = held.get("gradients", 0)
        return {"optimizer_state": _whole_state(run, oom, gradients) - held.get("optimizer_state", 0)}
    if phase in _BEFORE_STEP and run.settings is not None and not optimizer(run.settings.optim).steps_in_backward:
        trained = held.get("adapters") or held.get("weights", 0)
        gradients = max(trained, held.get("gradients", 0))
        state = _whole_state(run, oom, gradients)
        return {
            "gradients": gradients - held.get("gradients", 0),
            "optimizer_state": state - held.get("optimizer_state", 0),
        }
    return {}


def _whole_state(run: Run, oom: Mapping[str, Any], gradients: int) -> int:
    """Return the bytes of an optimizer's whole state beside so many bytes of gradients; 0 where it is not known."""
    if run.settings is None:
        named = any(word in frame.lower() for frame in oom.get("stack") or [] for word in _ADAM)
        return 2 * gradients if named else 0
    row = optimizer(run.settings.optim)
    if row.paged:
        return 0
    itemsize = _gradient_itemsize(run.settings)
    return row.state_bytes(gradients // itemsize, itemsize)


def _gradient_itemsize(settings: Settings) -> int:
    if settings.lora_r is not None:
        return 2 if settings.load_in_4bit else 4
    return DTYPE_BYTES[settings.weights_dtype]


def _whole_cache(run: Run) -> int:
    """Return the bytes of generation's cache at the end of the longest completion; 0 where it is not known."""
    settings, shape = run.settings, run.shape
    if settings is None or shape is None or settings.generation != "hf" or settings.cache_implementation != "dynamic":
        return 0
    together = settings.per_device_train_batch_size * settings.generation_steps
    together = min(together, settings.generation_batch or together)
    itemsize = 2 if settings.mixed_precision != "no" else DTYPE_BYTES[settings.weights_dtype]
    return together * shape.kv_cache_bytes(settings.prompt_length + settings.completion_length, itemsize)


def _need(oom: Mapping[str, Any], held: Mapping[str, int], still: Mapping[str, int]) -> tuple[str, int]:
    """Return the phase that needs most of what is still ahead, and the bytes allocated then, at least."""
    now, request, rest = int(oom["allocated_bytes"]), int(oom["requested_bytes"]), sum(still.values())
    if oom["phase"] not in _BEFORE_STEP:
        # The request that failed is a part of what is still to be made.
        return str(oom["phase"]), now + max(request, rest)
    standing = sum(n for name, n in held.items() if name not in _GONE)
    in_step = standing + rest
    return ("optimizer_step", in_step) if in_step > now + request else (str(oom["phase"]), now + request)


def _available(oom: Mapping[str, Any]) -> int | None:
    """Return what torch could have used: what it held, what was idle, and what the device had left."""
    free, limit = oom.get("device_free_bytes"), oom.get("limit_bytes")
    if limit is not None:
        left = max(0, int(limit) - int(oom.get("reserved_bytes") or 0))
        free = left if free is None else min(int(free), left)
    elif oom.get("limited"):
        free = 0
    if free is None:
        return None
    idle = sum(int(oom.get(f"{name}_bytes") or 0) for name in ("cached", "inactive_split", "private_pool"))
    return int(oom["allocated_bytes"]) + idle + int(free)
