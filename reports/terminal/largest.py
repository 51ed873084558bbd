"""Draw the table of the largest allocations for a terminal, so that sizes, evidence and line numbers are never cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memprof.reports.document.model import GUESS, Allocation
from memprof.reports.document.text import gib, short_path, thousands
from memprof.reports.terminal.elements import swatch

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["largest_table", "shorten_left"]

_TITLES = ("Largest alive at the peak", "Largest alive")
_GAP = 2
# A category's letter and a space stand before each name.
_SWATCH = 2
# Names are cut down to so many columns before the places where things are made are left out.
_NARROW = 16


@dataclass(frozen=True)
class _Line:
    """One row's words: what it is, how many, bytes, evidence, ``file.py:123`` and the function there."""

    category: str
    name: str
    many: str
    size: str
    evidence: str
    place: str
    function: str


@dataclass(frozen=True)
class _Widths:
    """Columns of text; ``site`` is 0 where the places are left out."""

    label: int
    size: int
    evidence: int
    site: int


def largest_table(allocations: Sequence[Allocation], width: int, colour: bool) -> Table:
    """Make the table, at most ``width`` columns wide.

    Sizes, evidence and ``file.py:123`` are written whole or not at all; names give way, their beginnings first.
    """
    from rich.table import Table
    from rich.text import Text

    lines = [_line(a) for a in allocations]
    widths = _widths(lines, width)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    title = next((t for t in _TITLES if len(t) <= widths.label), _TITLES[-1][: widths.label])
    columns = [(title, widths.label, False), ("GiB", widths.size, True), ("Known by", widths.evidence, False)]
    columns += [("Made at", widths.site, False)] if widths.site else []
    for words, columns_wide, right in columns:
        table.add_column(words, justify="right" if right else "left", no_wrap=True, width=columns_wide)
    for line in lines:
        room = widths.label - _SWATCH - len(line.many)
        label = Text.assemble(swatch(line.category, colour), f" {shorten_left(line.name, room)}{line.many}")
        cells: list[Text | str] = [label, line.size, line.evidence]
        table.add_row(*cells, *([Text(_site(line, widths.site))] if widths.site else []))
    return table


def shorten_left(words: str, width: int) -> str:
    """Cut the beginning of ``words`` so that ``width`` columns hold the rest, whole parts of a dotted name first."""
    if len(words) <= width:
        return words
    if width < 2:
        return "…"[:width]
    rest = words[-(width - 1) :]
    dot = rest.find(".")
    return "…" + (rest[dot:] if 0 <= dot < len(rest) // 2 else rest)


def _line(allocation: Allocation) -> _Line:
    many = f" ×{thousands(allocation.count)}" if allocation.count > 1 else ""
    many += GUESS if allocation.guessed else ""
    name = allocation.name or allocation.shape or allocation.detail or allocation.category_label.lower()
    place, _, function = short_path(allocation.site, 1).partition(" ")
    return _Line(allocation.category, name, many, gib(allocation.bytes), allocation.evidence, place, function)


def _widths(lines: Sequence[_Line], width: int) -> _Widths:
    """Give names what the figures leave, and the places what the names leave; no place at all where names need it."""
    sizes, evidence = max(6, *(len(x.size) for x in lines)), max(len("Known by"), *(len(x.evidence) for x in lines))
    rest = width - sizes - evidence - 2 * _GAP - _GAP
    names = max(len(_TITLES[-1]), *(_SWATCH + len(x.name) + len(x.many) for x in lines))
    wanted = max(len(_TITLES[0]), names)
    place = max(len(x.place) for x in lines)
    room = rest - _GAP - place
    if not place or room < min(names, _NARROW):
        return _Widths(max(min(wanted, rest), 1), sizes, evidence, 0)
    label = min(wanted, room)
    site = min(rest - _GAP - label, max(len(_whole_site(x)) for x in lines))
    return _Widths(label, sizes, evidence, max(site, len("Made at")))


def _whole_site(line: _Line) -> str:
    return f"{line.place} {line.function}".strip()


def _site(line: _Line, width: int) -> str:
    """Write ``file.py:123 function``; of a function that is too long its beginning, and nothing of three letters."""
    whole = _whole_site(line)
    if len(whole) <= width:
        return whole
    room = width - len(line.place) - 2
    return f"{line.place} {line.function[:room]}…" if room > 3 else line.place
