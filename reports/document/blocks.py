"""The blocks that answers are made of: filled once in ``answers/``, drawn by ``terminal.draw``, ``markdown.draw`` and,
where a page shows them, ``html.elements``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Union

from memprof.report.advice import Headline as FoundHeadline

#: What stands behind a guessed row where there is no pattern to draw.
GUESS = " ?"

# ---- cells -----------------------------------------------------------------------------------------------------------


class BarPart(NamedTuple):
    """Bytes of one category (or of free space) in a bar. ``id`` chooses the colour; ``guessed`` of the bytes are."""

    id: str
    label: str
    bytes: int
    guessed: int = 0

    @property
    def marked(self) -> str:
        """The label, with a mark where a tenth of the bytes or more is guessed."""
        return f"{self.label}{GUESS}" if self.guessed * 10 >= self.bytes > 0 else self.label


@dataclass(frozen=True)
class TextCell:
    """A cell of words.

    ``category`` or ``phase`` is what a square before them has the colour of, ``badges`` stand behind them and are never
    cut; ``tone`` is ``ok``, ``bad``, ``muted``, ``strong``, ``code`` or nothing; a terminal shows ``short`` where there
    is one. On a page ``folded`` opens below them (the page's script finds more under ``opens``), and ``small`` stands
    there; it sorts and copies a size as ``bytes``.
    """

    text: str
    tone: str = ""
    badges: tuple[str, ...] = ()
    category: str = ""
    phase: str = ""
    small: str = ""
    folded: tuple[str, ...] = ()
    opens: str | None = None
    short: str = ""
    bytes: int | None = None


@dataclass(frozen=True)
class Figure:
    """Bytes with, on a page, a bar beside them, and ``small`` words below; ``capped``: the bar shows the card's end."""

    bytes: int | None
    parts: tuple[BarPart, ...] = ()
    small: str = ""
    capped: bool = False


@dataclass(frozen=True)
class Curve:
    """Values in their order, drawn as a line of blocks; None where one is not known."""

    values: tuple[int | None, ...]


#: Words, bytes (``None``: not known), a bar of parts on the table's scale, or a curve.
Cell = Union[str, int, None, TextCell, Figure, Curve, "tuple[BarPart, ...]"]


# ---- blocks: ``on`` are the kinds of screens one is for: ``t``, ``m`` and ``p`` for terminal, Markdown and page ------


class Column(NamedTuple):
    """A column's heading, a ``short`` one for narrow places, a ``page``'s own, and a ``note`` that terminals leave out.

    ``wide`` ones are left out of narrow screens. Where there is no room, words of those that ``wrap`` go over several
    lines, those of ``whole`` ones stay as they are, others are cut: at their beginning where ``cut_left``, after the
    first word where ``keeps_first``, never below ``least``. Columns with a ``rank`` are left out where there is no room
    still, the highest first; those of the later ``group`` stand in a table below. A ``folds`` heading may take two
    lines, a ``named`` one may be cut. A page adds up what it shows of those that have ``sums``.
    """

    title: str
    right: bool = False
    wide: bool = False
    wraps: bool = False
    whole: bool = False
    on: str = "tmp"
    page: str = ""
    note: str = ""
    short: str = ""
    rank: int = 0
    group: int = 0
    least: int = 6
    cut_left: bool = False
    keeps_first: bool = False
    folds: bool = False
    named: bool = False
    sums: bool = False


class TableRow(NamedTuple):
    """A row; the one that matters most is ``strong``.

    Of rows within rows ``path`` holds the ids, outermost first, ``parts`` those of the rows right below, ``hint`` what
    it is; ``kind`` is ``total``, ``beside``, ``zero``, ``fits`` or nothing.
    """

    cells: tuple[Cell, ...]
    strong: bool = False
    path: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    kind: str = ""
    hint: str = ""
    on: str = "tmp"


@dataclass(frozen=True)
class TableBlock:
    """Rows under headings.

    ``scale`` is the bytes of a full bar, ``capacity`` the card's; a page calls the table ``kind`` in its styles.
    ``units``: headings above sizes say GiB. ``elsewhere`` says where columns are that a terminal has no room for. In
    Markdown a ``folded`` table opens below these words.
    """

    columns: tuple[Column, ...]
    lines: tuple[TableRow, ...]
    kind: str = "plain"
    scale: int = field(default=1, kw_only=True)
    capacity: int | None = field(default=None, kw_only=True)
    units: bool = field(default=True, kw_only=True)
    elsewhere: str = field(default="", kw_only=True)
    folded: str = field(default="", kw_only=True)
    on: str = field(default="tmp", kw_only=True)

    def seen(self, kind: str, wide: bool = True) -> TableBlock:
        """Return what a kind of screen shows of it."""
        shown = [i for i, column in enumerate(self.columns) if kind in column.on and (wide or not column.wide)]
        lines = tuple(line for line in self.lines if kind in line.on)
        return replace(self, lines=lines).only(shown)

    def only(self, columns: Sequence[int]) -> TableBlock:
        """Return some of its columns."""
        lines = tuple(line._replace(cells=tuple(line.cells[i] for i in columns)) for line in self.lines)
        return replace(self, columns=tuple(self.columns[i] for i in columns), lines=lines)

    def part(self, first: int, end: int | None = None) -> TableBlock:
        """Return some of its rows."""
        return replace(self, lines=self.lines[first:end])

    def heads(self) -> list[str]:
        """Return the headings, those above sizes with their unit: for screens whose sizes have none of their own."""
        if not self.units:
            return [column.title for column in self.columns]
        sized = [any(isinstance(line.cells[i], int) for line in self.lines) for i in range(len(self.columns))]
        return [
            ("GiB" if column.title in ("GiB", "Size") else f"{column.title}, GiB") if has else column.title
            for column, has in zip(self.columns, sized, strict=True)
        ]


def table(
    columns: Sequence[Column | str], lines: Sequence[TableRow], kind: str = "plain", scale: int = 1, on: str = "tmp"
) -> TableBlock | None:
    """Make a table; None without rows. A heading alone is a column of words."""
    heads = tuple(Column(column) if isinstance(column, str) else column for column in columns)
    return TableBlock(heads, tuple(lines), kind, scale=scale or 1, on=on) if lines else None


class Fact(NamedTuple):
    """A labelled figure; ``bytes`` where it is a size, ``value`` its words, ``note`` a line below it."""

    label: str
    value: str
    note: str = ""
    bytes: int | None = None


class FactsBlock(NamedTuple):
    """Labelled figures, one a line."""

    facts: tuple[Fact, ...]
    on: str = "tmp"


class Paragraph(NamedTuple):
    """A paragraph of some ``tone`` (as of :class:`TextCell`): ``lead`` begins it in bold, ``after`` ends it muted.

    A terminal begins it with a category's square, and indents it.
    """

    text: str
    tone: str = ""
    lead: str = ""
    after: str = ""
    category: str = ""
    indent: int = 0
    on: str = "tmp"


class Bars(NamedTuple):
    """Bars on one scale, ``(name, parts, words)`` a line, and what their parts are, ``figures`` with them.

    A mark stands where the card of ``capacity`` bytes ends; where each has a card of its own, at the bar's of ``ends``.
    """

    lines: tuple[tuple[str, tuple[BarPart, ...], str], ...]
    scale: int
    capacity: int | None = None
    ends: tuple[int | None, ...] = ()
    figures: bool = False
    on: str = "t"


class Code(NamedTuple):
    """Lines to paste or to look up, never wrapped; ``language`` is the fence's in Markdown, ``indent`` a terminal's.

    Where ``paths`` are too long for a terminal, their beginnings are left out.
    """

    lines: tuple[str, ...]
    language: str = "text"
    indent: int = 0
    paths: bool = False
    on: str = "tmp"


class Notes(NamedTuple):
    """Sentences that stand last, one a line; a terminal begins each with ``word``."""

    notes: tuple[str, ...]
    word: str = "Note: "
    on: str = "tmp"


class HeadlineBlock(NamedTuple):
    """The answer in sentences, as the JSON's ``headline`` has them; ``bad`` where memory ran out or does not suffice.

    Renderers draw them as they are; a part may be empty.
    """

    verdict: str
    cause: str = ""
    action: str = ""
    assumed: str = ""
    bad: bool = False
    on: str = "tmp"

    @classmethod
    def of(cls, found: FoundHeadline, *, bad: bool = False) -> HeadlineBlock:
        """Take a report's ``headline``."""
        assumed = f"Assumed: {'; '.join(found.assumed)}." if found.assumed else ""
        return cls(found.verdict, found.cause, found.action, assumed, bad)

    @property
    def sentences(self) -> str:
        """The whole answer in a line."""
        verdict = self.verdict if self.verdict.endswith((".", "!", "?")) else f"{self.verdict}."
        return " ".join(part for part in (verdict, self.cause, self.action, self.assumed) if part)


Block = HeadlineBlock | Paragraph | FactsBlock | Bars | TableBlock | Code | Notes


class ReportLayout(NamedTuple):
    """An answer: headline, title, and sections of blocks, an empty line between two; None and empty ones are nothing.

    The first section stands right below the title.
    """

    sections: tuple[tuple[Block | None, ...], ...]
    title: str = ""
    subtitle: tuple[str, ...] = ()
    headline: HeadlineBlock | None = None
