"""The table that answers are made of: filled once, drawn for a terminal, as Markdown and on a page by one function each
(``terminal.elements.draw_table``, ``markdown.elements.draw_table``, ``html.elements.draw_table``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Union

__all__ = ["GUESS", "Cell", "Column", "Line", "Part", "Table", "Words", "table"]


@dataclass(frozen=True)
class Part:
    """Bytes of one category (or of free space) in a bar. ``id`` chooses the colour; ``guessed`` of the bytes are."""

    id: str
    label: str
    bytes: int
    guessed: int = 0

    @property
    def marked(self) -> str:
        """The label, with a mark where a tenth of the bytes or more is guessed."""
        return f"{self.label}{GUESS}" if self.guessed * 10 >= self.bytes > 0 else self.label


#: What stands behind a guessed row where there is no pattern to draw.
GUESS = " ?"


@dataclass(frozen=True)
class Words:
    """A cell of words.

    ``category`` or ``phase`` is what a square before them has the colour of, ``badges`` stand behind them; ``tone`` is
    ``ok``, ``bad``, ``muted``, ``code`` or nothing. On a page ``folded`` opens below them (the page's script finds more
    under ``opens``), and ``small`` stands there.
    """

    text: str
    tone: str = ""
    badges: tuple[str, ...] = ()
    category: str = ""
    phase: str = ""
    small: str = ""
    folded: tuple[str, ...] = ()
    opens: str | None = None


#: Words, bytes (``None``: not known), or a bar of parts on the table's scale.
Cell = Union[str, int, None, Words, "tuple[Part, ...]"]


@dataclass(frozen=True)
class Column:
    """A column's heading.

    ``wide`` ones are left out of narrow screens. Where there is no room, words of those that ``wrap`` go over several
    lines, those of ``whole`` ones stay as they are, and others are cut short. ``on`` are the kinds of screens it is
    for: ``t``, ``m`` and ``p`` for terminal, Markdown and page.
    """

    title: str
    right: bool = False
    wide: bool = False
    wraps: bool = False
    whole: bool = False
    on: str = "tmp"


@dataclass(frozen=True)
class Line:
    """A row; the one that matters most is ``strong``."""

    cells: tuple[Cell, ...]
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """Rows under headings. ``scale`` is the bytes of a full bar; a page calls the table ``kind`` in its styles."""

    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    kind: str = "plain"
    scale: int = field(default=1, kw_only=True)

    def on(self, kind: str, wide: bool = True) -> Table:
        """Return what a kind of screen shows of it."""
        shown = [i for i, column in enumerate(self.columns) if kind in column.on and (wide or not column.wide)]
        lines = tuple(Line(tuple(line.cells[i] for i in shown), line.strong) for line in self.lines)
        return Table(tuple(self.columns[i] for i in shown), lines, self.kind, scale=self.scale)

    def part(self, first: int, end: int | None = None) -> Table:
        """Return some of its rows."""
        return Table(self.columns, self.lines[first:end], self.kind, scale=self.scale)

    def heads(self) -> list[str]:
        """Return the headings, those above sizes with their unit: for screens whose sizes have none of their own."""
        sized = [any(isinstance(line.cells[i], int) for line in self.lines) for i in range(len(self.columns))]
        return [
            ("GiB" if column.title in ("GiB", "Size") else f"{column.title}, GiB") if has else column.title
            for column, has in zip(self.columns, sized, strict=True)
        ]


def table(heads: str, lines: list[Line], kind: str = "plain", scale: int = 1) -> Table | None:
    """Make a table of headings such as ``Phase|Peak>|Held by~p``; None without rows.

    Behind a heading ``>`` sets figures to the right, ``~`` leaves it out of narrow screens, ``+`` lets words go over
    several lines, ``!`` keeps them whole, and letters after ``@`` say what kinds of screens it is for.
    """
    columns = []
    for head in heads.split("|"):
        title, _, on = head.partition("@")
        name = title.rstrip(">~+!")
        marks = title[len(name) :]
        columns.append(Column(name, ">" in marks, "~" in marks, "+" in marks, "!" in marks, on or "tmp"))
    return Table(tuple(columns), tuple(lines), kind, scale=scale or 1) if lines else None
