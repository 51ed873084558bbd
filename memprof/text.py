"""Make text from a foreign file safe to print."""

from __future__ import annotations


def clean_text(text: str, longest: int = 1 << 20) -> str:
    """Replace control characters (terminal escapes) and lone surrogates in text; keep new lines and tabs."""
    text = text[:longest]
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
