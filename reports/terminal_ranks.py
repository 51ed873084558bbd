"""The ranks of a run on a terminal: the fullest first, a bar of each, and what sets them apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memprof.reports.model import Part
from memprof.reports.ranks_model import RankRow, Ranks
from memprof.reports.text import gib, thousands

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["print_ranks"]

_MOST = 16


def print_ranks(console: Console, ranks: Ranks, colour: bool) -> None:
    """Print the ranks; below 80 columns without bars."""
    from memprof.reports.terminal import table_of
    from rich.text import Text

    wide = console.width >= 80
    nodes = len(ranks.nodes) > 1 and wide
    columns = [("Rank", "left", False), *([("Node", "left", False)] if nodes else []), ("Peak in", "left", True)]
    columns += [("GiB", "right", False), *([("", "left", True)] if wide else [])]
    table = table_of(*columns)
    scale = max((r.peak_bytes for r in ranks.rows), default=0)
    for row in ranks.rows[:_MOST]:
        cells: list[Text | str] = [_name(row), *([row.node] if nodes else []), row.where, gib(row.peak_bytes)]
        if wide:
            cells.append(_bar(ranks, row, scale, max(console.width - (66 if nodes else 52), 10), colour))
        table.add_row(*cells, style="bold" if row.shown else None)
    console.print(Text(ranks.sentence))
    if ranks.missing:
        console.print(Text(ranks.missing, style="bold red"))
    console.print(table)
    if len(ranks.rows) > _MOST:
        rest = ranks.rows[_MOST:]
        low, high = gib(rest[-1].peak_bytes), gib(rest[0].peak_bytes)
        console.print(Text(f"{thousands(len(rest))} more, from {high} down to {low} GiB", style="dim"))
    for sentence in ranks.differences:
        console.print(Text(sentence))


def _name(row: RankRow) -> str:
    return f"{row.rank}{' out of memory' if row.oom else ''}"


def _bar(ranks: Ranks, row: RankRow, scale: int, width: int, colour: bool) -> Text:
    from memprof.reports.terminal import draw_bar

    parts = [
        Part(c, label, cell.bytes) for (c, label), cell in zip(ranks.columns, row.cells, strict=True) if cell.bytes
    ]
    return draw_bar(parts, scale, width, colour)
