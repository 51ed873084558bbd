"""Hold what cards compute and move in a second, as their makers publish it: the roofline of estimated times."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.config.gpus import row_of

_TERA, _GIGA = 10**12, 10**9


@dataclass(frozen=True)
class Speed:
    """State a card's peaks, per second.

    ``half`` is FLOPs of dense matrix products of bfloat16 or float16 summed in float32, without sparsity; ``single``
    those of float32 without TF32, torch's default. ``bandwidth`` is bytes of device memory, ``host`` bytes in one
    direction between host and device.
    """

    half: float
    single: float
    bandwidth: float
    host: float


def speed_of(name: str, *, bfloat16: bool = True) -> Speed | None:
    """Find a card's peaks by its name in ``cards.toml``; None for a card known by its size alone. ``bfloat16``: half
    precision is that, which cards before Ampere compute as float32."""
    row = row_of(name)
    if row is None:
        return None
    as_single = bfloat16 and (0, 0) < row.capability < (8, 0)
    half = row.single if as_single else row.half
    return Speed(half * _TERA, row.single * _TERA, row.memory * _GIGA, row.host * _GIGA)
