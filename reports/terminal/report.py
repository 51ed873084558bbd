"""Draw a report for a terminal: the peak and its bar, tables of rows, ranks, phases and allocations, the checks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from memprof.reports.document.blocks import Table as Rows
from memprof.reports.document.model import Document, Part, Prediction, RankRow, Ranks, Row, Summary
from memprof.reports.document.text import gib, percent, thousands
from memprof.reports.terminal.elements import draw_bar, draw_table, legend, print_headline, swatch, table_of
from memprof.reports.terminal.largest import largest_table
from memprof.reports.terminal.room import print_room
from memprof.reports.terminal.screen import abilities, console_of, text_of, write_to

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

__all__ = ["print_document", "render_short", "render_terminal"]

# Of more ranks the fullest are listed.
_MOST_RANKS = 16
_FULLEST = 8
# Up to so many lines of digits show all ranks.
_STRIP = 8
_MOST_ALLOCATIONS = 10


def print_document(document: Document, stream: TextIO | None = None) -> None:
    """Print a report to ``stream`` (standard output) in its width, its colours and its characters."""
    stream = stream or sys.stdout
    write_to(stream, render_terminal(document, *abilities(stream)))


def render_short(document: Document) -> str:
    """Render the peak, its bar and the rows, as wide as standard output: what a training run ends with."""
    width, colour = abilities(sys.stdout)
    console = console_of(width, colour)
    _print_summary(console, document, colour, facts=False)
    console.print()
    console.print(_components(document, width, colour))
    return text_of(console)


def render_terminal(document: Document, width: int = 100, colour: bool = False) -> str:
    """Render a report as text of at most ``width`` columns; below 80 the bars and shares are left out."""
    console = console_of(width, colour)
    _print_summary(console, document, colour)
    if document.prediction and (document.prediction.needs or document.prediction.lengths):
        console.print()
        _print_prediction(console, document.prediction, colour)
    console.print()
    console.print(_components(document, width, colour))
    if document.recordings:
        console.print()
        _print_recordings(console, document.recordings, colour)
    if document.phase_table:
        console.print()
        console.print(draw_table(document.phase_table, width, colour))
    if document.allocations:
        console.print()
        console.print(largest_table(document.allocations[:_MOST_ALLOCATIONS], width, colour))
    console.print()
    _print_closing(console, document)
    return text_of(console)


def _print_summary(console: Console, document: Document, colour: bool, facts: bool = True) -> None:
    from rich.text import Text

    summary = document.summary
    print_headline(console, document.headline)
    console.print()
    console.print(Text(document.title, style="bold"))
    console.print(Text(" · ".join(document.subtitle), style="dim"))
    if document.oom:
        console.print(Text(document.oom.sentence))
    if document.ranks:
        console.print()
        _print_ranks(console, document.ranks, colour)
        console.print()
        console.print(Text(f"{document.ranks.in_full}:", style="bold"))
    if not document.headline.verdict.startswith(summary.peak_word):
        console.print(_peak_line(summary))
    parts = (*summary.bar, *summary.rest)
    console.print(draw_bar(parts, summary.scale_bytes, console.width - 1, colour))
    for line in legend(parts, console.width - 1, colour):
        console.print(line)
    if (guessed := summary.guessed) is not None:
        console.print(Text.assemble(f"{guessed.label}: ", (guessed.value, "bold"), (f"  {guessed.note}", "dim")))
    if document.room is not None:
        print_room(console, document.room, colour, drawn=facts or document.oom is not None)
    for fact in summary.facts if facts else ():
        console.print(Text.assemble(f"{fact.label}: ", (fact.value, "bold"), (f"  {fact.note}", "dim")))


def _peak_line(summary: Summary) -> Text:
    from rich.text import Text

    line = Text.assemble(f"{summary.peak_word}: ", (f"{gib(summary.peak_bytes)} GiB", "bold"), f" in {summary.where}")
    if summary.capacity_bytes:
        line.append(f", {percent(summary.peak_bytes, summary.capacity_bytes)} of the device")
    return line


def _print_prediction(console: Console, prediction: Prediction, colour: bool) -> None:
    """Print what each phase needs, and what other lengths need."""
    from rich.text import Text

    if prediction.needs:
        console.print(draw_table(prediction.needs, console.width, colour))
    if prediction.lengths:
        console.print()
        console.print(Text(prediction.lengths_sentence))
        console.print(draw_table(prediction.lengths, console.width, colour))


def _components(document: Document, width: int, colour: bool) -> Table:
    wide = width >= 80
    columns = [("GiB", "left", False), ("At the peak", "right", False)]
    columns += [("", "left", True), ("of peak", "right", False)] if wide else []
    columns.append(("Own peak", "right", False))
    table = table_of(*columns)
    total = document.rows[-1].at_peak
    bar_width = max(width - 70, 10)
    for row in document.rows:
        _add_row(table, row, 0, total, bar_width if wide else 0, colour)
        for child in row.children:
            _add_row(table, child, 1, total, bar_width if wide else 0, colour)
    return table


def _add_row(table: Table, row: Row, level: int, total: int, bar_width: int, colour: bool) -> None:
    from rich.text import Text

    label = Text.assemble("  ", swatch(row.id, colour), f" {row.marked}") if level else Text(row.label, style="bold")
    cells: list[Text | str] = [label, gib(row.at_peak)]
    if bar_width:
        part = (Part(row.id, row.label, row.at_peak),)
        shown = level or row.id == "unattributed"
        cells.append(draw_bar(part, total, bar_width, colour) if shown else "")
        cells.append(percent(row.at_peak, total))
    cells.append("–" if row.own_peak is None else gib(row.own_peak))
    table.add_row(*cells, style="bold" if row.id == "total" else None)


def _print_ranks(console: Console, ranks: Ranks, colour: bool) -> None:
    """Print the ranks; below 80 columns without bars."""
    from rich.text import Text

    wide = console.width >= 80
    nodes = ranks.several_nodes and wide
    columns = [("Rank", "left", False), *([("Node", "left", False)] if nodes else []), ("Peak in", "left", True)]
    columns += [("GiB", "right", False), *([("", "left", True)] if wide else [])]
    table = table_of(*columns)
    scale = max((r.peak_bytes for r in ranks.rows), default=0)
    most = _MOST_RANKS if len(ranks.rows) <= _MOST_RANKS else _FULLEST
    for row in ranks.rows[:most]:
        cells: list[Text | str] = [_rank_name(row), *([row.node] if nodes else []), row.where, gib(row.peak_bytes)]
        if wide:
            cells.append(_rank_bar(ranks, row, scale, max(console.width - (66 if nodes else 52), 10), colour))
        table.add_row(*cells, style="bold" if row.shown else None)
    console.print(Text(ranks.sentence))
    if ranks.missing:
        console.print(Text(ranks.missing, style="bold red"))
    console.print(table)
    if len(ranks.rows) > most:
        rest = ranks.rows[most:]
        low, high = gib(min(r.peak_bytes for r in rest)), gib(max(r.peak_bytes for r in rest))
        console.print(Text(f"{thousands(len(rest))} more, from {high} down to {low} GiB", style="dim"))
        _print_strip(console, ranks)
    for sentence in ranks.differences:
        console.print(Text(sentence))


def _print_strip(console: Console, ranks: Ranks) -> None:
    """Print a digit for each rank's peak, in the order of their numbers."""
    from rich.text import Text

    shades = {row.rank: str(row.shade) for row in ranks.rows}
    if set(shades.values()) == {"0"}:
        return
    digits = "".join(shades.get(rank, ".") for rank in range(ranks.world_size))
    line = 64 if console.width >= 72 else 32
    if len(digits) > _STRIP * line:
        return
    console.print(Text("Peaks of all ranks in order: 1 is the lowest, 8 the highest, . missing"))
    for first in range(0, len(digits), line):
        console.print(Text(f"{first:>6} {digits[first : first + line]}"))


def _print_recordings(console: Console, dumps: Rows, colour: bool) -> None:
    """Print the dumps of the folder; of many the first, and how many there are."""
    from rich.text import Text

    console.print(draw_table(dumps.part(0, _MOST_RANKS), console.width, colour))
    if (rest := len(dumps.lines) - _MOST_RANKS) > 0:
        console.print(Text(f"{thousands(rest)} more dumps; -o FILE.html lists all", style="dim"))


def _rank_name(row: RankRow) -> str:
    return f"{row.rank}{' out of memory' if row.oom else ''}"


def _rank_bar(ranks: Ranks, row: RankRow, scale: int, width: int, colour: bool) -> Text:
    parts = [
        Part(c, label, cell.bytes) for (c, label), cell in zip(ranks.columns, row.cells, strict=True) if cell.bytes
    ]
    return draw_bar(parts, scale, width, colour)


def _print_closing(console: Console, document: Document) -> None:
    from rich.text import Text

    if document.evidence:
        known = ", ".join(f"{e.id} {100 * e.share:.1f} %" for e in document.evidence)
        console.print(Text(f"How it is known: {known}"))
    wrong = [c for c in document.adds_up.checks if c.ok is False]
    if wrong:
        console.print(Text("Does it add up? No:", style="bold red"))
        for check in wrong:
            console.print(Text(f"  {check.label}: {check.value}, {check.note}"))
    else:
        console.print(Text("Does it add up? Yes, to the byte."))
    if document.steps:
        console.print(Text(document.steps.sentence))
    for fact in document.outside:
        console.print(
            Text.assemble("Outside torch, ", f"{fact.label.lower()}: ", (fact.value, "bold"), (f"  {fact.note}", "dim"))
        )
    for note in document.notes:
        console.print(Text(f"Note: {note}", style="dim"))
