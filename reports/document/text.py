"""Write words and figures as a reader sees them, and make names from strangers harmless."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from memprof.units import GIB, format_bytes, format_gib

__all__ = ["duration", "gib", "percent", "plain", "sentence_list", "short_path", "signed_gib", "size", "thousands"]

# Characters that print nothing but change how their neighbours print: controls (ANSI escapes among them), surrogates,
# bidirectional overrides and the like ("format" characters), line and paragraph separators.
_HARMFUL = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def plain(value: object) -> str:
    """Write ``value`` as one harmless line: control, bidirectional and separator characters as escapes."""
    text = str(value)
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(c) if unicodedata.category(c) in _HARMFUL else c for c in text)


def _visible(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


def gib(n_bytes: int) -> str:
    """Write GiB with two decimals and no unit; values below 0.005 GiB that are not zero print as ``<0.01``."""
    if n_bytes and abs(n_bytes) < 0.005 * GIB:
        return "<0.01" if n_bytes > 0 else ">-0.01"
    return format_gib(n_bytes)


def size(n_bytes: int) -> str:
    """Write a size with its unit, the largest that leaves a digit before the point."""
    return format_bytes(n_bytes)


def signed_gib(n_bytes: int) -> str:
    """Write GiB with two decimals and a sign (a true minus); what rounds to nothing has none."""
    if abs(n_bytes) < 0.005 * GIB:
        return "0.00"
    return f"{'−' if n_bytes < 0 else '+'}{format_gib(abs(n_bytes))}"


def percent(part: int, whole: int) -> str:
    """Write ``part`` of ``whole`` in percent: whole numbers from 10 on, one decimal below, ``–`` of nothing."""
    if not whole:
        return "–"
    value = 100 * part / whole
    if 0 < value < 0.1:
        return "<0.1 %"
    return f"{value:.0f} %" if value >= 9.95 or value == 0 else f"{value:.1f} %"


def thousands(number: int) -> str:
    """Write an integer in groups of three digits."""
    return f"{number:,}".replace(",", "\u202f")


def duration(us: int) -> str:
    """Write microseconds in the unit a person would choose."""
    for factor, unit in ((1_000_000, "s"), (1_000, "ms")):
        if us >= factor:
            value = us / factor
            if unit == "s" and value >= 120:
                return f"{int(value // 60)} min {int(value % 60):02d} s"
            return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{us} µs"


def sentence_list(words: Iterable[str]) -> str:
    """Join words as ``a``, ``a and b``, ``a, b and c``."""
    parts = list(words)
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def short_path(frame: str, keep: int = 2) -> str:
    """Shorten a frame ``path:line function`` to the last ``keep`` parts of its path."""
    location, _, function = frame.partition(" ") if "\\" not in frame else frame.rpartition(" ")
    if not location:
        return frame
    parts = location.replace("\\", "/").split("/")
    return "/".join(parts[-keep:]) + (f" {function}" if function else "")
