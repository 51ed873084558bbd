"""Draw a table for a terminal: what matters is never cut, the rest gives way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memprof.reports.document.blocks import Cell, Column, Curve, Figure, TableRow, TextCell
from memprof.reports.document.blocks import TableBlock as Rows
from memprof.reports.document.text import plain, sentence_list
from memprof.reports.terminal.bars import draw_bar, short_labels, swatch

from memprof.units import gib

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

# Below this width a screen is narrow; a bar is at least and a curve at most so wide.
_WIDE, _SHORTEST_BAR, _LONGEST_CURVE = 80, 10, 40
_GAP, _LAST_RESORT = 2, 8
_BLOCKS = "▁▂▃▄▅▆▇█"


def draw_table(rows: Rows, width: int, colour: bool) -> Iterator[RenderableType]:
    """Draw a table, at most ``width`` columns wide; runs that have no room beside each other below each other."""
    shown = rows.seen("t", width >= _WIDE)
    for number, part in enumerate(_groups(shown, width, colour)):
        if number:
            yield ""
        laid = _laid(part, width, colour, folded=False)
        if len(laid.rows.columns) < len(part.columns) and any(column.folds for column in part.columns):
            laid = _laid(part, width, colour, folded=True)
        yield _drawn(laid, width, colour)
        left = [c.title for c in part.columns if c not in laid.rows.columns]
        if left and rows.elsewhere:
            yield f"No room here for {sentence_list(left)}: {rows.elsewhere}."


def _groups(rows: Rows, width: int, colour: bool) -> Iterator[Rows]:
    """Take as many groups of columns as fit at a time, each time with those that belong to none."""
    later = sorted({column.group for column in rows.columns} - {0})
    if not later:
        yield rows
    while later:
        for n_taken in range(len(later), 0, -1):
            taken = {0, *later[:n_taken]}
            part = rows.only([i for i, column in enumerate(rows.columns) if column.group in taken])
            bare = part.only([i for i, column in enumerate(part.columns) if not column.rank])
            if n_taken == 1 or _total(_measured(_named(bare, width), colour, folded=False).least) <= width:
                yield _named(part, width)
                break
        later = later[n_taken:]


def _named(rows: Rows, width: int) -> Rows:
    """Cut the names of runs that head columns."""
    names = [column.title for column in rows.columns if column.named]
    short = iter(short_labels(names, max((width - 44) // max(len(names), 1) // 2, 8)))
    return replace(rows, columns=tuple(c._replace(title=next(short)) if c.named else c for c in rows.columns))


@dataclass(frozen=True)
class _Laid:
    """A table in words: headings, cells, how wide each column would like to be, and how narrow it may be."""

    rows: Rows
    heads: list[str]
    cells: list[list[Text]]
    wide: list[int]
    least: list[int]

    def only(self, kept: Sequence[int]) -> _Laid:
        """Return some of the columns."""
        cells = [[row[i] for i in kept] for row in self.cells]
        heads, wide, least = ([values[i] for i in kept] for values in (self.heads, self.wide, self.least))
        return _Laid(self.rows.only(kept), heads, cells, wide, least)  # type: ignore[arg-type]


def _measured(rows: Rows, colour: bool, folded: bool) -> _Laid:
    heads = [
        head.rpartition(" ")[0] + "\n" + head.rpartition(" ")[2] if folded and column.folds and " " in head else head
        for head, column in zip(map(plain, rows.heads()), rows.columns, strict=True)
    ]
    cells = [[_cell(cell, line, colour) for cell in line.cells] for line in rows.lines]
    wide, least = [], []
    for i, column in enumerate(rows.columns):
        drawn = _is_drawn(rows, i)
        head = max(map(len, heads[i].split("\n")))
        words = max(6 if column.right else 0, head, *(row[i].cell_len for row in cells))
        wide.append(_SHORTEST_BAR if drawn else words)
        first = max((len(row[i].plain.partition(" ")[0]) for row in cells), default=0)
        firm = column.right or column.whole or drawn
        least.append(wide[i] if firm else max(first, head) if column.keeps_first else min(words, column.least))
    return _Laid(rows, heads, cells, wide, least)


def _is_drawn(rows: Rows, place: int) -> bool:
    return any(isinstance(line.cells[place], (tuple, Curve)) for line in rows.lines)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _laid(rows: Rows, width: int, colour: bool, folded: bool) -> _Laid:
    """Choose the columns there is room for, and make them as wide as that leaves them."""
    whole = _measured(rows, colour, folded)
    kept = [i for i, column in enumerate(rows.columns) if not column.rank]
    bare = len(kept)
    for rank in sorted({column.rank for column in rows.columns} - {0}):
        more = [i for i, column in enumerate(rows.columns) if column.rank == rank]
        if _total([whole.least[i] for i in (*kept, *more)]) <= width:
            kept += more
        elif len(kept) > bare:
            break
    found = whole.only(sorted(kept))
    columns = found.rows.columns
    soft = [i for i, column in enumerate(columns) if found.wide[i] > found.least[i]]
    for group in ([i for i in soft if columns[i].keeps_first], [i for i in soft if not columns[i].keeps_first]):
        _narrow(found.wide, group, width, found.least)
    _narrow(found.wide, soft, width, [min(_LAST_RESORT, least) for least in found.least])
    return found


def _narrow(wide: list[int], columns: Sequence[int], width: int, least: Sequence[int]) -> None:
    """Take from the widest of ``columns`` until the table fits or none can give more."""
    while _total(wide) > width and (able := [i for i in columns if wide[i] > least[i]]):
        wide[max(able, key=lambda i: wide[i])] -= 1


def _drawn(laid: _Laid, width: int, colour: bool) -> Table:
    from rich.table import Table
    from rich.text import Text

    rows, table = laid.rows, Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    bars = [_is_drawn(rows, i) for i in range(len(rows.columns))]
    others = [wide for wide, drawn in zip(laid.wide, bars, strict=True) if not drawn]
    space = max(width - sum(others) - _GAP * (len(bars) - 1) - 1, _SHORTEST_BAR)
    lines = [
        [_drawn_cell(cell, laid, i, j, space, colour) for j, cell in enumerate(line.cells)]
        for i, line in enumerate(rows.lines)
    ]
    for i, (column, head) in enumerate(zip(rows.columns, laid.heads, strict=True)):
        title = column.short if column.short and len(head) > laid.wide[i] else head
        wide = max((row[i].cell_len for row in lines), default=0) if bars[i] else laid.wide[i]
        table.add_column(
            Text(title),
            justify="right" if column.right else "left",
            no_wrap=not column.wraps,
            overflow="fold" if column.wraps else "ellipsis",
            width=max(wide, len(title) if bars[i] else 0, 1),
        )
    for line, row in zip(rows.lines, lines, strict=True):
        style = "bold" if line.strong or line.kind == "total" else "dim" if line.kind == "beside" else None
        table.add_row(*row, style=style)
    return table


def _drawn_cell(cell: Cell, laid: _Laid, row: int, place: int, space: int, colour: bool) -> Text:
    from rich.text import Text

    if isinstance(cell, tuple):
        return draw_bar(cell, laid.rows.scale, space, colour)
    if isinstance(cell, Curve):
        return Text(_curve(cell, min(space, _LONGEST_CURVE)))
    return _fitted(laid.cells[row][place], cell, laid.rows.columns[place], laid.wide[place])


def _cell(cell: Cell, line: TableRow, colour: bool) -> Text:
    from rich.text import Text

    if isinstance(cell, TextCell):
        words = plain(cell.short or " ".join((cell.text, *cell.badges)))
        if cell.category:
            return Text.assemble("  " * (len(line.path) - 1), swatch(cell.category, colour), f" {words}")
        return Text(words, style={"strong": "bold", "muted": "dim"}.get(cell.tone, ""))
    if isinstance(cell, Figure):
        cell = cell.bytes
    if isinstance(cell, (tuple, Curve)):
        return Text()
    return Text("–" if cell is None else gib(cell) if isinstance(cell, int) else plain(cell))


def _fitted(text: Text, cell: Cell, column: Column, width: int) -> Text:
    """Cut what is too long where its column may be cut; badges and a first word are never cut."""
    if text.cell_len <= width:
        return text
    if column.keeps_first:
        first, _, rest = text.plain.partition(" ")
        room = width - len(first) - 2
        return type(text)(f"{first} {rest[:room]}…" if room > 3 else first)
    if not (column.cut_left and isinstance(cell, TextCell)):
        return text
    words = plain(cell.text)
    before = text.plain.index(words)
    behind = len(text.plain) - before - len(words)
    name = shorten_left(words, width - before - behind)
    return text[:before].append(name).append(text.plain[before + len(words) :])


def shorten_left(words: str, width: int) -> str:
    """Cut the beginning of ``words`` so that ``width`` columns hold the rest, whole parts of a dotted name first."""
    if len(words) <= width:
        return words
    if width < 2:
        return "…"[:width]
    rest = words[-(width - 1) :]
    dot = rest.find(".")
    return "…" + (rest[dot:] if 0 <= dot < len(rest) // 2 else rest)


def _curve(curve: Curve, width: int) -> str:
    """Draw values as blocks, the highest of each group of neighbours."""
    group = -(-len(curve.values) // width)
    parts = [curve.values[i : i + group] for i in range(0, len(curve.values), group)]
    heights = [max((v for v in part if v is not None), default=None) for part in parts]
    known = [h for h in heights if h is not None]
    low = min(known, default=0)
    span = max(max(known, default=0) - low, 1)
    return "".join(" " if h is None else _BLOCKS[min(7, (h - low) * 8 // span)] for h in heights)
