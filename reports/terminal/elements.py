"""What terminal renderers share: a category's letter or colour, bars, legends, tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memprof.reports.document.blocks import Cell, Words
from memprof.reports.document.blocks import Table as Rows
from memprof.reports.document.model import Headline, Part
from memprof.reports.document.text import gib
from memprof.reports.palette import DARK, FALLBACK

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

__all__ = ["LETTERS", "draw_bar", "draw_table", "legend", "mark_capacity", "print_headline", "swatch", "table_of"]

LETTERS = {
    "weights": "W", "adapters": "A", "weight_casts": "C", "reference_model": "R", "reward_model": "J",
    "value_model": "V", "gradients": "G", "optimizer_state": "O", "activations": "X", "activation_gradients": "Y",
    "loss_logits": "L", "kv_cache": "K", "inference_engine": "E", "inputs": "I", "temporaries": "T",
    "communication": "Z", "workspace": "B", "unattributed": "?", "cached": "-", "inactive_split": "~",
    "private_pools": "=", "non_torch": "N", "free": ".",
    "held": "H", "request": "!",
    "training": "M",
}  # fmt: skip

# Parts of a bar that are no category.
_COLOURS = {
    "cached": "#49525d",
    "inactive_split": "#8a929c",
    "private_pools": "#b6a5cf",
    "non_torch": "#6b7480",
    "training": "#8a929c",
    "free": "#2a3038",
    "held": "#5b8dd6",
    "request": "#e5484d",
}


def print_headline(console: Console, headline: Headline) -> None:
    """Print the answer: verdict, cause, what to change, what was assumed; a line each."""
    from rich.text import Text

    console.print(Text(headline.verdict, style="bold red" if headline.bad else "bold"))
    for line, style in ((headline.cause, ""), (headline.action, "bold"), (headline.assumed, "dim")):
        if line:
            console.print(Text(line, style=style))


def swatch(identifier: str, colour: bool) -> Text:
    """Draw a category's square in its colour, or its letter."""
    from rich.text import Text

    if colour:
        return Text("■", style=_style(identifier))
    return Text(LETTERS.get(identifier, "?"))


def _style(identifier: str) -> str:
    return DARK.get(identifier) or _COLOURS.get(identifier, FALLBACK)


def draw_bar(parts: Sequence[Part], scale: int, width: int, colour: bool) -> Text:
    """Draw parts side by side, ``scale`` bytes to ``width`` columns.

    Ends are rounded, not widths, so the bar never grows longer than its sum.
    """
    from rich.text import Text

    bar, done, drawn = Text(no_wrap=True), 0, 0
    for part in parts:
        done += part.bytes
        end = min(width, round(width * done / scale)) if scale else 0
        if colour:
            bar.append("█" * (end - drawn), style=_style(part.id))
        else:
            bar.append(LETTERS.get(part.id, "?") * (end - drawn))
        drawn = max(drawn, end)
    return bar


def legend(parts: Sequence[Part], width: int, colour: bool, figures: bool = True) -> list[Text]:
    """Put the parts' names side by side, as many to a line as fit."""
    from rich.text import Text

    lines = [Text()]
    for part in parts:
        entry = Text.assemble(
            swatch(part.id, colour), f" {part.label} {gib(part.bytes)}" if figures else f" {part.label}"
        )
        if lines[-1].cell_len and lines[-1].cell_len + 3 + entry.cell_len > width:
            lines.append(Text())
        lines[-1].append("   " if lines[-1].cell_len else "").append(entry)
    return lines


def mark_capacity(bar: Text, capacity: int | None, scale: int, space: int) -> None:
    """Put a ``¦`` where the device ends."""
    from rich.text import Text

    if not capacity:
        return
    at = min(round(space * capacity / scale), space - 1)
    bar.pad_right(max(at + 1 - len(bar), 0))
    rest = bar[at + 1 :] if at + 1 < len(bar) else Text()
    marked = Text.assemble(bar[:at] if at else Text(), "¦", rest)
    bar.truncate(0)
    bar.append_text(marked)


def table_of(*columns: tuple[str, str, bool]) -> Table:
    """Make a table without lines; each column is ``(heading, justification, may shrink)``."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title, justify, shrinks in columns:
        table.add_column(
            title,
            justify="right" if justify == "right" else "left",
            no_wrap=True,
            overflow="ellipsis",
            min_width=None if shrinks else max(len(title), 6),
        )
    return table


# Below this width a screen is narrow; a bar and a column of words are at least so wide.
_WIDE, _SHORTEST_BAR, _SHORTEST_WORDS = 80, 10, 6


def draw_table(rows: Rows, width: int, colour: bool) -> Table:
    """Draw a table; bars take what the other columns leave."""
    shown = rows.on("t", width >= _WIDE)
    cells = [[_cell(cell, colour) for cell in line.cells] for line in shown.lines]
    heads = shown.heads()
    bars = [any(isinstance(line.cells[i], tuple) for line in shown.lines) for i in range(len(heads))]
    columns = list(enumerate(shown.columns))
    wide = [
        0 if bars[i] else max(6 if c.right else 0, len(heads[i]), *(row[i].cell_len for row in cells))
        for i, c in columns
    ]
    _narrowed(wide, [i for i, c in columns if not (c.right or c.whole or bars[i])], width - 2 * (len(wide) - 1))
    space = max(width - sum(wide) - 2 * (len(wide) - 1) - 1, _SHORTEST_BAR)
    table = table_of(*[(heads[i], "right" if c.right else "left", not c.right) for i, c in columns])
    for i, column in columns:
        table.columns[i].width = space if bars[i] else wide[i]
        if column.wraps:
            table.columns[i].no_wrap, table.columns[i].overflow = False, "fold"
    for line, row in zip(shown.lines, cells, strict=True):
        for i, cell in enumerate(line.cells):
            if isinstance(cell, tuple):
                row[i] = draw_bar(cell, shown.scale, space, colour)
        table.add_row(*row, style="bold" if line.strong else None)
    return table


def _narrowed(wide: list[int], columns: Sequence[int], room: int) -> None:
    """Take from the widest of ``columns`` until all together have ``room``."""
    while sum(wide) > room and columns and wide[widest := max(columns, key=lambda i: wide[i])] > _SHORTEST_WORDS:
        wide[widest] -= 1


def _cell(cell: Cell, colour: bool) -> Text:
    from rich.text import Text

    if isinstance(cell, Words):
        before: list[Text | str] = [swatch(cell.category, colour), " "] if cell.category else []
        return Text.assemble(*before, " ".join((cell.text, *cell.badges)))
    if isinstance(cell, tuple):
        return Text()
    return Text("–" if cell is None else gib(cell) if isinstance(cell, int) else cell)
