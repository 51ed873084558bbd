"""Draw a comparison for a terminal: one bar a run on one scale, then the rows."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from memprof.reports.document.comparison import Compared, Comparison, OnlyIn, children_worth_a_line
from memprof.reports.document.text import gib
from memprof.reports.terminal.elements import (
    draw_bar,
    draw_table,
    legend,
    mark_capacity,
    print_headline,
    swatch,
    table_of,
)
from memprof.reports.terminal.screen import abilities, console_of, text_of, write_to

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["print_comparison", "render_comparison"]

# So many settings are listed where none is known to matter.
_FEW_SETTINGS = 6


def print_comparison(comparison: Comparison, stream: TextIO | None = None) -> None:
    """Print a comparison to ``stream`` (standard output) in its width, its colours and its characters."""
    stream = stream or sys.stdout
    write_to(stream, render_comparison(comparison, *abilities(stream)))


def render_comparison(comparison: Comparison, width: int = 100, colour: bool = False) -> str:
    """Render a comparison as text of at most ``width`` columns; a narrow table has fewer columns."""
    from rich.text import Text

    console = console_of(width, colour)
    print_headline(console, comparison.headline)
    console.print()
    console.print(Text(comparison.title, style="bold"))
    if comparison.unchanged:
        console.print(Text(comparison.unchanged))
    _print_settings(console, comparison, colour)
    console.print()
    _print_bars(console, comparison, colour)
    console.print()
    _print_rooms(console, comparison, colour)
    _print_rows(console, comparison, colour)
    for entry in comparison.only_in:
        console.print()
        _print_only_in(console, entry, 6 if len(comparison.columns) == 2 else 3, colour)
    if comparison.notes:
        console.print()
    for note in comparison.notes:
        console.print(Text(f"Note: {note}", style="dim"))
    return text_of(console)


def _print_settings(console: Console, comparison: Comparison, colour: bool) -> None:
    """Print the settings that matter; where none does, the first others beside few runs."""
    from rich.text import Text

    shown, others = comparison.settings, comparison.others
    rest = len(others.lines) if others else 0
    if shown is None and others is not None and len(comparison.columns) <= 3:
        shown, rest = others.part(0, _FEW_SETTINGS), rest - _FEW_SETTINGS
    if shown or rest > 0:
        console.print()
    if shown:
        console.print(draw_table(shown, console.width, colour))
    if rest > 0:
        words = f"… and {rest} other settings" if shown else f"{rest} circumstances differ"
        console.print(Text(f"{words}, see --json or the page", style="dim"))


def _print_rooms(console: Console, comparison: Comparison, colour: bool) -> None:
    """Print how far each run was from out of memory: a bar each on one scale, then what the parts are."""
    from rich.text import Text

    rooms = [(column.label, column.room) for column in comparison.columns if column.room is not None]
    if not rooms:
        return
    console.print(Text("How far from out of memory", style="bold"))
    names = _short_labels([label for label, _ in rooms], min(24, console.width // 3))
    margin = max(map(len, names)) + 1
    scale, space = max(room.scale_bytes for _, room in rooms), max(console.width - margin - 1, 10)
    for name, (_, room) in zip(names, rooms, strict=True):
        bar = draw_bar(room.parts, scale, space, colour)
        mark_capacity(bar, room.capacity_bytes, scale, space)
        console.print(Text.assemble(name.ljust(margin), bar), no_wrap=True)
    parts = {part.id: part for _, room in rooms for part in room.parts}
    for line in legend(list(parts.values()), console.width - 1, colour, figures=False):
        console.print(line)
    for label, room in rooms:
        console.print(Text(f"{label}: {room.sentence}"))
    console.print()


def _print_bars(console: Console, comparison: Comparison, colour: bool) -> None:
    """Print each run's composition on one scale, with a mark where the device ends."""
    from rich.text import Text

    names = _short_labels([column.label for column in comparison.columns], min(24, console.width // 3))
    margin = max(map(len, names)) + 1
    scale = max(comparison.scale_bytes, comparison.capacity_bytes or 0)
    space = max(console.width - margin - 12, 10)
    for name, column, total in zip(names, comparison.columns, comparison.rows[-1].at_peak, strict=True):
        bar = draw_bar(column.parts, scale, space, colour)
        mark_capacity(bar, comparison.capacity_bytes, scale, space)
        line = Text.assemble(name.ljust(margin), bar)
        console.print(line.append(f" {'–' if total is None else gib(total)}", style="bold"), no_wrap=True)
    for line in legend(comparison.legend, console.width - 1, colour, figures=False):
        console.print(line)
    if comparison.capacity_bytes:
        console.print(Text(f"¦ {gib(comparison.capacity_bytes)} GiB, the device", style="dim"))


@dataclass(frozen=True)
class _Shown:
    """Which columns there is room for."""

    own: bool
    difference: bool
    ratio: bool
    change: bool


# From everything to the bare figures; the first that fits is shown.
_LAYOUTS = (
    _Shown(own=True, difference=True, ratio=True, change=True),
    _Shown(own=True, difference=True, ratio=False, change=True),
    _Shown(own=False, difference=True, ratio=False, change=True),
    _Shown(own=False, difference=False, ratio=False, change=True),
    _Shown(own=False, difference=True, ratio=False, change=False),
    _Shown(own=False, difference=False, ratio=False, change=False),
)
# The label's column shrinks to this before anything else is left out; a category's has its letter in it too.
_LABEL_WIDTH, _INDENT = 26, 4


def _print_rows(console: Console, comparison: Comparison, colour: bool) -> None:
    """Print the rows with as many columns as fit; further runs get further tables, each with the first run again."""
    later = list(range(1, len(comparison.columns)))
    while later:
        for n_taken in range(len(later), 0, -1):
            runs = [0, *later[:n_taken]]
            cells = [_table_cells(comparison, runs, shown, console.width) for shown in _LAYOUTS]
            fitting = next((c for c in cells if _width(c) <= console.width), None)
            if fitting or n_taken == 1:
                console.print(_rows(comparison, fitting or cells[-1], console.width, colour))
                break
        later = later[n_taken:]
        if later:
            console.print()


def _width(cells: list[list[str]]) -> int:
    return _LABEL_WIDTH + _figures_width(cells)


def _figures_width(cells: list[list[str]]) -> int:
    """Add up what stands right of the labels; a column is 6 wide at least."""
    columns = list(zip(*cells, strict=True))[1:]
    return sum(2 + max(6, *map(len, column)) for column in columns)


def _table_cells(comparison: Comparison, runs: list[int], shown: _Shown, width: int) -> list[list[str]]:
    """Write the head and every line in words: the label first, then the figures of ``runs``, then how they differ."""
    head = ["GiB at the peak"]
    for name in _short_labels([comparison.columns[i].label for i in runs], max((width - 44) // len(runs) // 2, 8)):
        head += [name, *(["own peak"] if shown.own else [])]
    for _ in runs[1:]:
        head += ["Difference"] if shown.difference else []
        head += ["Ratio"] if shown.ratio else []
        head += ["Change"] if shown.change else []
    lines = [line for row in comparison.rows for line in (row, *children_worth_a_line(row))]
    body = [_line_cells(line, runs, shown) for line in (*lines, *comparison.beside)]
    if comparison.verdicts:
        fits = [f"Fits {gib(comparison.capacity_bytes or 0)}"]
        for i in runs:
            fits += ["yes" if comparison.verdicts[i].fits else "no", *([""] if shown.own else [])]
        body.append(fits + [""] * (len(head) - len(fits)))
    return [head, *body]


def _line_cells(line: Compared, runs: list[int], shown: _Shown) -> list[str]:
    cells = [line.label]
    for i in runs:
        figure, own = line.at_peak[i], line.own_peak[i]
        cells.append("–" if figure is None else gib(figure))
        cells += ["" if own is None else gib(own)] if shown.own else []
    for i in runs[1:]:
        cells += [line.differences[i - 1]] if shown.difference else []
        cells += [line.ratios[i - 1]] if shown.ratio else []
        cells += [line.changes[i - 1]] if shown.change else []
    return cells


def _rows(comparison: Comparison, cells: list[list[str]], width: int, colour: bool) -> Table:
    from rich.text import Text

    head, *body = cells
    table = table_of((head[0], "left", True), *[(n, "left" if n == "Change" else "right", False) for n in head[1:]])
    room = max(width - _figures_width(cells), 8)
    kinds: list[tuple[str, int]] = []
    for row in comparison.rows:
        kinds += [(row.id, 0), *[(child.id, 1) for child in children_worth_a_line(row)]]
    kinds += [(line.id, 0) for line in comparison.beside]
    for i, line in enumerate(body):
        identifier, level = kinds[i] if i < len(kinds) else ("", 0)
        name = _cut(line[0], room - _INDENT if level else room)
        label = Text.assemble("  ", swatch(identifier, colour), f" {name}") if level else Text(name)
        style = "bold" if identifier == "total" else "dim" if i >= len(kinds) - len(comparison.beside) else None
        table.add_row(label, *line[1:], style=style)
    return table


def _cut(words: str, room: int) -> str:
    return words if len(words) <= room else f"{words[: room - 1]}…"


def _short_labels(labels: list[str], room: int) -> list[str]:
    """Cut labels to ``room`` characters: their ends stay where they begin alike, their beginnings otherwise.

    Labels that differ stay different, wherever it is that they do.
    """
    alike = len({label[: room // 2] for label in labels}) == 1
    short = [
        label if len(label) <= room else f"…{label[1 - room :]}" if alike else _cut(label, room) for label in labels
    ]
    if len(set(short)) == len(set(labels)):
        return short
    # Their ends are alike too: what differs is between.
    begun = next((i for i, letters in enumerate(zip(*labels, strict=False)) if len(set(letters)) > 1), 0)
    return [_cut(f"…{label[begun:]}" if begun else label, room) for label in labels]


def _print_only_in(console: Console, entry: OnlyIn, most: int, colour: bool) -> None:
    from rich.text import Text

    console.print(Text.assemble((entry.title, "bold"), (f"  {entry.note}", "dim")))
    console.print(draw_table(entry.allocations.part(0, most), console.width, colour))
