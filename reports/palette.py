"""Colours, patterns and letters of categories, phases and parts of a device: those of ``theme.toml``."""

from __future__ import annotations

from pathlib import Path

from memprof.files import read_toml

#: The rows of ``theme.toml``, by kind of id.
LOOKS = read_toml(Path(__file__).with_name("theme.toml"))
FALLBACK = "#8c9196"


def _of(key: str, *kinds: str) -> dict[str, str]:
    return {name: row[key] for kind in kinds for name, row in LOOKS[kind].items() if key in row}


LIGHT, DARK, PATTERNS = (_of(key, "category") for key in ("light", "dark", "pattern"))
PHASES = _of("colour", "phase")
LETTERS, TERMINAL = (_of(key, "category", "part") for key in ("letter", "dark"))


def slug(identifier: str) -> str:
    """Return an id as part of a CSS class; anything unexpected becomes ``unattributed``."""
    return identifier if identifier in LIGHT or identifier in PHASES else "unattributed"


def css_variables(colours: dict[str, str]) -> str:
    """Write each colour, and what can be read on it: ``--c-weights: #0b4f8a; --on-weights: #ffffff; ...``."""
    return " ".join(f"--c-{name}: {colour}; --on-{name}: {ink_on(colour)};" for name, colour in colours.items())


def ink_on(colour: str) -> str:
    """Choose white or black, whichever has the higher contrast on ``#rrggbb`` (WCAG 2's relative luminance)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if 1.05 / (luminance + 0.05) >= (luminance + 0.05) / 0.05 else "#000000"
