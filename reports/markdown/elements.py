"""What Markdown renderers share: words that are no markup, code spans, fences, tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from memprof.reports.document.blocks import Cell, Table, Words
from memprof.reports.document.model import Headline
from memprof.reports.document.text import gib

__all__ = ["code", "draw_table", "fence", "headline", "table", "text"]

_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~&$@]|:(?=\S))")


def text(words: str) -> str:
    """Escape words from anywhere: nothing in them is markup, a link, a mention or the end of a table's cell."""
    return _SPECIAL.sub(r"\\\1", words.replace("\n", " ")).replace("\\<", "&lt;").replace("\\>", "&gt;")


def headline(found: Headline) -> str:
    """Render the answer as one paragraph, its verdict in bold."""
    parts = (text(part) for part in (found.cause, found.action, found.assumed) if part)
    return " ".join([f"**{text(found.verdict)}.**", *parts])


def code(words: str) -> str:
    """Put a code span around anything, safe inside a table."""
    longest = max((len(run) for run in re.findall(r"`+", words)), default=0)
    ticks = "`" * (longest + 1)
    pad = " " if words.startswith("`") or words.endswith("`") else ""
    return f"{ticks}{pad}{words}{pad}{ticks}".replace("|", "\\|")


def fence(lines: Iterable[str], indent: str = "") -> str:
    body = [f"{indent}{line}" for line in lines]
    longest = max((len(run) for line in body for run in re.findall(r"`+", line)), default=0)
    ticks = "`" * max(longest + 1, 3)
    return "\n".join([f"{indent}{ticks}text", *body, f"{indent}{ticks}"])


def table(head: Sequence[str], align: str, rows: Iterable[Sequence[str]]) -> str:
    """Make a table of cells that are Markdown already; ``align`` has one letter a column, ``l`` or ``r``."""
    rule = ["---:" if a == "r" else "---" for a in align]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *rows])


def draw_table(rows: Table | None) -> str:
    """Draw a table; nothing where there is none."""
    if rows is None:
        return ""
    shown = rows.on("m")
    align = "".join("r" if column.right else "l" for column in shown.columns)
    return table([text(h) for h in shown.heads()], align, [[_cell(cell) for cell in x.cells] for x in shown.lines])


def _cell(cell: Cell) -> str:
    if isinstance(cell, Words):
        shown = code(cell.text) if cell.tone == "code" else text(cell.text)
        shown = f"**{shown}**" if cell.tone == "bad" else shown
        return " ".join([shown, *(badge if badge.startswith("×") else f"**{text(badge)}**" for badge in cell.badges)])
    if isinstance(cell, tuple):
        return ""
    return "–" if cell is None else text(gib(cell) if isinstance(cell, int) else cell)
