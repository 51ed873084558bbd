"""Parse sizes such as ``24GB`` or ``24GiB``, and write bytes as GiB with two decimals."""

from __future__ import annotations

import re

from memprof.errors import UsageError

__all__ = ["GIB", "format_bytes", "format_gib", "parse_size"]

GIB = 2**30

_FACTORS: dict[str, int] = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Return the bytes in a size such as ``24GB`` (of 10⁹ bytes each), ``24GiB`` (of 2³⁰) or ``1048576``.

    Raises:
        UsageError: the text is not a size.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match.group(2).upper()) if match else None
    if match is None or factor is None:
        raise UsageError(f"{text!r} is not a size; write it like 24GB (10^9 bytes) or 24GiB (2^30 bytes).")
    return round(float(match.group(1)) * factor)


def format_gib(n_bytes: int) -> str:
    """Write ``n_bytes`` in GiB with two decimals and no unit."""
    return f"{n_bytes / GIB:.2f}"


def format_bytes(n_bytes: int) -> str:
    """Write ``n_bytes`` in the largest binary unit, up to GiB, in which it is at least 1."""
    value = float(n_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{int(value)} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
