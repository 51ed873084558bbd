"""Make text from a foreign file safe to print, and write lists of numbers."""

from __future__ import annotations

from collections.abc import Iterable


def clean_text(text: str, longest: int = 1 << 20) -> str:
    """Replace control characters (terminal escapes) and lone surrogates in text; keep new lines and tabs."""
    text = text[:longest]
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def numbered(noun: str, numbers: Iterable[int]) -> str:
    """Return a noun with numbers: ``rank 7``, ``ranks 0–3 and 7``."""
    parts = number_ranges(numbers)
    words = " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))
    return f"{noun} {words}" if len(parts) == 1 and parts[0].isdecimal() else f"{noun}s {words}"


def number_ranges(numbers: Iterable[int]) -> list[str]:
    """Write the numbers 0, 1, 2, 3 and 7 as ``0–3`` and ``7``."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return [text for a, b in found for text in ([f"{a}–{b}"] if b > a + 1 else map(str, range(a, b + 1)))]
