"""Parse sizes such as ``24GB`` or ``24GiB``, and write bytes as GiB with two decimals."""

from __future__ import annotations

import re

from memprof.errors import UsageError

GIB = 2**30
#: Bytes of one element.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# G is GB, as cards are sold: 24G and 24GB are 24 × 10⁹ bytes.
_FACTORS: dict[str, int] = {
    "B": 1,
    **{f"{p}{b}": 1000**i for i, p in enumerate("KMGT", 1) for b in ("", "B")},
    **{f"{p}I{b}": 1024**i for i, p in enumerate("KMGT", 1) for b in ("", "B")},
}
# A bare number as large as this was meant in bytes.
_LOOKS_LIKE_BYTES = 2**20
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Return the bytes in a size: ``24GB`` and ``24G`` are of 10⁹ bytes each, ``24GiB`` and ``24Gi`` of 2³⁰.

    A number without a unit is refused, whatever it is given for: ``24`` could be GB or GiB, and is no 24 bytes. Only 0
    is 0 in every unit.

    Raises:
        UsageError: the text is not a size, or a number without a unit.
    """
    match = _SIZE.fullmatch(text)
    number, unit = match.groups() if match else ("", "")
    if match and not unit:
        return _bare(number)
    factor = _FACTORS.get(unit.upper())
    if factor is None:
        raise UsageError(f"{text!r} is not a size; write it like 24GB (10^9 bytes) or 24GiB (2^30 bytes).")
    return round(float(number) * factor)


def _bare(number: str) -> int:
    if not float(number):
        return 0
    if float(number) >= _LOOKS_LIKE_BYTES:
        raise UsageError(f"{number} what? Write {number}B if it is bytes.")
    raise UsageError(f"{number} what? {number}GB or {number}GiB.")


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


def gib(n_bytes: int) -> str:
    """Write GiB with two decimals and no unit, below zero with a true minus.

    Values below 0.005 GiB that are not zero print as ``<0.01``, or ``>−0.01``.
    """
    if n_bytes and abs(n_bytes) < 0.005 * GIB:
        return "<0.01" if n_bytes > 0 else ">−0.01"
    return format_gib(n_bytes) if n_bytes >= 0 else f"−{format_gib(-n_bytes)}"


def amount(n_bytes: int) -> str:
    """Write a size with its unit in few digits: GiB with two decimals from 1 GiB on, MiB and smaller below."""
    size_, sign = abs(n_bytes), "−" if n_bytes < 0 else ""
    if size_ >= 1023.5 * 2**20:
        return f"{sign}{size_ / GIB:.2f} GiB"
    if size_ >= 1023.5 * 2**10:
        value = size_ / 2**20
        return f"{sign}{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} MiB"
    return f"{sign}{size_ / 2**10:.0f} KiB" if size_ >= 1024 else f"{sign}{size_} B" if size_ else "0"


def percent(part: int, whole: int) -> str:
    """Write ``part`` of ``whole`` in percent: whole numbers from 10 on, one decimal below, ``–`` of nothing."""
    if not whole:
        return "–"
    value = 100 * part / whole
    if 0 < value < 0.1:
        return "<0.1%"
    return f"{value:.0f}%" if value >= 9.95 or value == 0 else f"{value:.1f}%"
