"""What the lean trainer was told (``LeanGRPOConfig``, or the facts of a recording), as settings of a simulation.

No torch here: a recording's values are looked at too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["LEAN_ARGUMENTS", "lean_values", "not_kept"]

# Of one name in a LeanGRPOConfig and in settings.
_SAME = ("max_tokens_per_piece", "tiled_mlp", "prefix_sharing", "generation_batch")
# What :func:`lean_values` reads.
LEAN_ARGUMENTS = (*_SAME, "checkpointing", "gradient_checkpointing", "cache_implementation", "generation_cache")
# Where these are not at their default, a simulation of the settings alone is of another run.
_ONLY_THE_TRAINERS = (
    "micro_splitting",
    "exact_two_pass",
    "skip_zero_advantages",
    "fused_loss",
    "loss_chunk_tokens",
    "packing",
    "reference",
    "stochastic_rounding",
)
_CACHES = ("dynamic", "static", "quantized")


def lean_values(config: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Settings of :class:`~memprof.simulate.settings.Settings`, by name; what is another in them is said in ``notes``.

    Args:
        config: :data:`LEAN_ARGUMENTS` by name; what is missing has the lean trainer's default.
        notes: sentences are added to it.
    """
    values = {name: config[name] for name in _SAME if config.get(name) is not None}
    kind = config.get("checkpointing") or "auto"
    if kind == "auto":
        kind = bool(config.get("gradient_checkpointing", True))
    elif kind == "mlp":
        notes.append("checkpointing='mlp' is none in the settings, which holds more")
        kind = False
    name = config.get("cache_implementation") or config.get("generation_cache") or "dynamic"
    if name not in _CACHES:
        notes.append(f"the cache {name!r} is one that stays on the device in the settings, which holds more")
        name = "dynamic"
    return {"recipe": "lean", "gradient_checkpointing": kind, "cache_implementation": name, **values}


def not_kept(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """``name=value`` of the lean trainer's settings that are not at their default and that settings do not hold."""
    set_so = ((name, config.get(name, defaults.get(name))) for name in _ONLY_THE_TRAINERS)
    return [f"{name}={value!r}" for name, value in set_so if value != defaults.get(name)]
