"""Look ahead from an out-of-memory error: what the step still had to allocate, and what it would have needed in all.

The request that failed is seldom the last one. In an optimizer's first step most of the state may still be missing, in
a first backward the gradients and the state, in generation the rest of the cache. That they will be asked for follows
from the model, so that "it would have fitted in one contiguous block" can be judged against the whole step.
"""

from __future__ import annotations

from memprof.advice.recorded_run import AdvisedRun, run_of
from memprof.config.optimizers import optimizer
from memprof.config.settings import Settings
from memprof.report import Report
from memprof.report.base import ByCategory, known
from memprof.report.run import OutOfMemory, StillAhead
from memprof.units import DTYPE_BYTES
from memprof.vocabulary import Category, Phase

# What an optimizer's step finds: the rest of a pass is gone by then.
_GONE = {
    Category.ACTIVATIONS, Category.ACTIVATION_GRADIENTS, Category.LOSS_LOGITS, Category.KV_CACHE, Category.TEMPORARIES,
    Category.WEIGHT_CASTS,
}  # fmt: skip
_BEFORE_STEP = (Phase.FORWARD, Phase.BACKWARD)
# A foreign run's optimizer is known where a frame names it: torch's Adam and AdamW keep two moments like the parameter.
_ADAM = ("adamw", "adam.py", "_adam")


def look_ahead(report: Report) -> StillAhead | None:
    """Estimate what the step that ran out of memory (a report's ``oom``) would have needed in all.

    Returns None where nothing is known to be ahead.
    """
    oom = report.oom
    if oom is None or not oom.categories or not oom.allocated_bytes:
        return None
    run = run_of(report)
    still = {name: n for name, n in _still(run, oom, oom.categories).items() if n > 0}
    if not still:
        return None
    moment, needed = _need(oom, oom.allocated_bytes, oom.categories, still)
    available = _available(oom, oom.allocated_bytes)
    return StillAhead(
        still=still,
        moment=moment,
        needed_bytes=needed,
        available_bytes=available,
        short_bytes=None if available is None else max(0, needed - available),
    )


def _still(run: AdvisedRun, oom: OutOfMemory, held: ByCategory) -> dict[Category, int]:
    """List what is yet to be made, by category; below zero or zero where it is all there."""
    cache, gradients = held.get(Category.KV_CACHE, 0), held.get(Category.GRADIENTS, 0)
    state = held.get(Category.OPTIMIZER_STATE, 0)
    if oom.phase == Phase.GENERATE:
        return {Category.KV_CACHE: _whole_cache(run) - cache}
    if oom.phase == Phase.OPTIMIZER_STEP:
        return {Category.OPTIMIZER_STATE: _whole_state(run, oom, gradients) - state}
    if oom.phase in _BEFORE_STEP and run.settings is not None and not optimizer(run.settings.optim).steps_in_backward:
        trained = held.get(Category.ADAPTERS) or held.get(Category.WEIGHTS, 0)
        all_gradients = max(trained, gradients)
        return {
            Category.GRADIENTS: all_gradients - gradients,
            Category.OPTIMIZER_STATE: _whole_state(run, oom, all_gradients) - state,
        }
    return {}


def _whole_state(run: AdvisedRun, oom: OutOfMemory, gradients: int) -> int:
    """Return the bytes of an optimizer's whole state beside so many bytes of gradients; 0 where it is not known."""
    if run.settings is None:
        named = any(word in frame.lower() for frame in oom.stack for word in _ADAM)
        return 2 * gradients if named else 0
    row = optimizer(run.settings.optim)
    if row.paged:
        return 0
    itemsize = _gradient_itemsize(run.settings)
    return row.state_bytes(gradients // itemsize, itemsize)


def _gradient_itemsize(settings: Settings) -> int:
    if settings.has_adapter:
        return 2 if settings.load_in_4bit else 4
    return DTYPE_BYTES[settings.weights_dtype]


def _whole_cache(run: AdvisedRun) -> int:
    """Return the bytes of generation's cache at the end of the longest completion; 0 where it is not known."""
    settings, shape = run.settings, run.shape
    if settings is None or shape is None or settings.generation != "hf" or settings.cache_implementation != "dynamic":
        return 0
    together = settings.per_device_train_batch_size * settings.generation_steps
    together = min(together, settings.generation_batch or together)
    itemsize = 2 if settings.mixed_precision != "no" else DTYPE_BYTES[settings.weights_dtype]
    return together * shape.kv_cache_bytes(settings.prompt_length + settings.completion_length, itemsize)


def _need(oom: OutOfMemory, now: int, held: ByCategory, still: ByCategory) -> tuple[Phase | None, int]:
    """Return the phase that needs most of what is still ahead, and the bytes allocated then, at least."""
    request, rest = oom.requested_bytes, sum(still.values())
    if oom.phase not in _BEFORE_STEP:
        # The request that failed is a part of what is still to be made.
        return oom.phase, now + max(request, rest)
    in_step = sum(n for name, n in held.items() if name not in _GONE) + rest
    return (Phase.OPTIMIZER_STEP, in_step) if in_step > now + request else (oom.phase, now + request)


def _available(oom: OutOfMemory, allocated: int) -> int | None:
    """Return what torch could have used: what it held, what was idle, and what the device had left."""
    free, limit = oom.device_free_bytes, known(oom.limit_bytes)
    if limit is not None:
        left = max(0, limit - (known(oom.reserved_bytes) or 0))
        free = left if free is None else min(free, left)
    elif oom.limited:
        free = 0
    if free is None:
        return None
    idle = (oom.cached_bytes or 0) + (oom.inactive_split_bytes or 0) + (oom.private_pool_bytes or 0)
    return allocated + idle + free
