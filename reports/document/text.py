"""Write words and figures as a reader sees them."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from memprof.reports.palette import LOOKS

from memprof.units import GIB, format_bytes, format_gib
from memprof.vocabulary import CATEGORY_LABELS, GROUP_LABELS, Category, Group, phase_words

# Characters that print nothing but change how their neighbours print: controls (ANSI escapes among them), surrogates,
# bidirectional overrides and the like ("format" characters), line and paragraph separators.
_HARMFUL = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def plain(text: str, keep: str = "") -> str:
    """Return text as one line that prints as it is: control, bidirectional and separator characters as escapes.

    Names and sentences come from other people's files; what draws them calls this. ``keep`` are characters to leave.
    """
    if text.isascii() and text.isprintable():
        return text
    harmful = {c for c in set(text) if c not in keep and unicodedata.category(c) in _HARMFUL}
    return "".join(_visible(c) if c in harmful else c for c in text) if harmful else text


def _visible(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


#: Write a size with its unit, the largest that leaves a digit before the point.
size = format_bytes


def signed_gib(n_bytes: int) -> str:
    """Write GiB with two decimals and a sign (a true minus); what rounds to nothing has none."""
    if abs(n_bytes) < 0.005 * GIB:
        return "0.00"
    return f"{'−' if n_bytes < 0 else '+'}{format_gib(abs(n_bytes))}"


def thousands(number: int) -> str:
    """Write an integer in groups of three digits."""
    return f"{number:,}"


def duration(us: int) -> str:
    """Write microseconds in the unit a person would choose."""
    for factor, unit in ((1_000_000, "s"), (1_000, "ms")):
        if us >= factor:
            value = us / factor
            if unit == "s" and value >= 120:
                return f"{int(value // 60)} min {int(value % 60):02d} s"
            return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{us} µs"


def time_taken(us: int | None, estimated: bool) -> str:
    """Write a phase's time: as measured, as estimated, or a dash where there is neither."""
    if us is None:
        return "–"
    return f"≈ {duration(us)}" if estimated else duration(us)


def time_heading(estimated: bool) -> str:
    """Head the phases' times: measured ones are sums over a run, estimated ones are one step's."""
    return "A step" if estimated else "Time"


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


CATEGORY_WORDS: dict[str, str] = {str(c): LOOKS["category"][c]["words"] for c in Category}
GROUP_WORDS: dict[str, str] = LOOKS["group"]
EVIDENCE_WORDS: dict[str, str] = LOOKS["evidence"]
KIND_WORDS: dict[str, str] = LOOKS["kind"]
HISTORY_WORDS: dict[str, str] = LOOKS["history"]
#: Bottom to top in stacked charts.
STACK_ORDER: tuple[Category, ...] = tuple(map(Category, LOOKS["category"]))


_CATEGORIES = frozenset(Category)


def humanise(identifier: str) -> str:
    """Write an id as words: ``no_grad`` as ``no grad``."""
    return identifier.replace("_", " ")


def phase_label(phase: str) -> str:
    """Write a phase as a heading."""
    return phase_words(phase).capitalize()


def phase_short(phase: str) -> str:
    """Write a phase in a few letters, for narrow places."""
    return str(LOOKS["phase"].get(phase, {}).get("short", humanise(phase)))


def where_words(phase: str | None, step: int | None) -> str:
    """Name an instant in a sentence: its phase, and its step if that is known."""
    known = phase_label(phase).lower() if phase else "an unknown phase"
    return f"{known}, step {step}" if step is not None else known


def category_label(category: str) -> str:
    """Write a category as a heading."""
    return CATEGORY_LABELS[Category(category)] if category in _CATEGORIES else humanise(category).capitalize()


def group_label(group: Group) -> str:
    """Write a group as a heading."""
    return GROUP_LABELS[group]
