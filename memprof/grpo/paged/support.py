"""Say which models and settings the rolling batch generates for; the others generate in passes."""

from __future__ import annotations

import inspect
from typing import Any

from memprof.config.model_shape import ModelShape
from memprof.errors import InputError
from memprof.grpo.techniques.whole_length import follows_length


class NotPaged(Exception):
    """The rolling batch cannot generate this: the message says why, as a clause."""


def why_not(model: Any, settings: Any, length: int, *, together: bool) -> str | None:
    """Say why the rolling batch is not for this causal LM without wrappers, or return None.

    ``length``: tokens of the longest sequence. ``together``: forwards of the ranks talk to each other, so each rank
    must run as many.
    """
    if together:
        return "ranks run their forwards together"
    cache = getattr(settings, "cache_implementation", None)
    if cache not in (None, "dynamic"):
        return f"cache_implementation is {cache!r}"
    taken = inspect.signature(type(model).forward).parameters
    missing = [name for name in ("position_ids", "past_key_values", "attention_mask") if name not in taken]
    if missing:
        return f"{type(model).__name__} does not accept {missing[0]}"
    try:
        shape = ModelShape.of(model.config)
    except InputError as error:
        return str(error)
    if follows_length(model):
        return "the model's rotary frequencies follow the longest of the sequences that are generated together"
    others = sorted({kind for kind in shape.layer_kinds if kind not in ("full_attention", "sliding_attention")})
    if others:
        return f"the model has layers of kind {', '.join(others)}"
    if "sliding_attention" in shape.layer_kinds and shape.window is not None and shape.window < length:
        return f"layers see a window of {shape.window} tokens, and sequences have up to {length}"
    return None
