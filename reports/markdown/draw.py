"""Draw an answer as GitHub Markdown: words that are no markup, code spans, fences, tables."""

from __future__ import annotations

import re
from collections.abc import Iterable

from memprof.reports.document.blocks import (
    Bars,
    Block,
    Cell,
    Code,
    Curve,
    FactsBlock,
    Figure,
    HeadlineBlock,
    Paragraph,
    ReportLayout,
    TableBlock,
    TableRow,
    TextCell,
)  # fmt: skip
from memprof.reports.document.text import plain

from memprof.units import gib

_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~&$@]|:(?=\S))")


def text(words: str) -> str:
    """Escape words from anywhere: nothing in them is markup, a link, a mention or the end of a table's cell."""
    return _SPECIAL.sub(r"\\\1", plain(words)).replace("\\<", "&lt;").replace("\\>", "&gt;")


def code(words: str) -> str:
    """Put a code span around anything, safe inside a table."""
    words = plain(words)
    longest = max((len(run) for run in re.findall(r"`+", words)), default=0)
    ticks = "`" * (longest + 1)
    pad = " " if words.startswith("`") or words.endswith("`") else ""
    return f"{ticks}{pad}{words}{pad}{ticks}".replace("|", "\\|")


def draw(sheet: ReportLayout) -> str:
    """Draw an answer: title, headline, then block after block."""
    head = [f"### {text(sheet.title)}" if sheet.title else "", text(" · ".join(sheet.subtitle))]
    if (found := sheet.headline) is not None:
        head.append(f"**{text(found.verdict)}.** {_rest(found)}".rstrip())
    blocks = [_block(block) for section in sheet.sections for block in section if block and "m" in block.on]
    return "\n\n".join(block for block in (*head, *blocks) if block) + "\n"


def _block(block: Block) -> str:
    if isinstance(block, HeadlineBlock):  # one of several answers
        return "\n\n".join(part for part in (f"### {text(block.verdict)}", _rest(block)) if part)
    if isinstance(block, Paragraph):
        return _said(block)
    if isinstance(block, FactsBlock):
        return "\n".join(
            f"- {text(f.label)}: **{text(f.value)}**" + (f" ({text(f.note)})" if f.note else "") for f in block.facts
        )
    if isinstance(block, TableBlock):
        drawn = _table(block.seen("m"))
        folded = f"<details><summary>{text(block.folded)}</summary>\n\n{drawn}\n\n</details>"
        return folded if block.folded else drawn
    if isinstance(block, Code):
        return _fence(block.lines, block.language) if block.lines else ""
    if isinstance(block, Bars):
        return ""  # its table says the same
    return "\n".join(f"- {text(note)}" for note in block.notes)


def _rest(found: HeadlineBlock) -> str:
    return " ".join(text(part) for part in (found.cause, found.action, found.assumed) if part)


def _said(block: Paragraph) -> str:
    words = code(block.text) if block.tone == "code" else text(block.text.strip())
    words = f"**{words}**" if block.tone in ("strong", "bad") else words
    parts = [">" if block.tone == "quote" else "", f"**{text(block.lead.strip())}**" if block.lead else "", words]
    parts.append(f"({text(block.after.strip())})" if block.after else "")
    return " ".join(part for part in parts if part)


def _fence(lines: Iterable[str], language: str) -> str:
    body = [plain(line) for line in lines]
    longest = max((len(run) for line in body for run in re.findall(r"`+", line)), default=0)
    ticks = "`" * max(longest + 1, 3)
    return "\n".join([f"{ticks}{language}", *body, ticks])


def _table(shown: TableBlock) -> str:
    notes = [f" ({text(column.note)})" if column.note else "" for column in shown.columns]
    heads = [text(head) + note for head, note in zip(shown.heads(), notes, strict=True)]
    rule = ["---:" if column.right else "---" for column in shown.columns]
    rows = [[_cell(cell, line, i) for i, cell in enumerate(line.cells)] for line in shown.lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [heads, rule, *rows])


def _cell(cell: Cell, line: TableRow, place: int) -> str:
    if isinstance(cell, Figure):
        cell = cell.bytes
    if isinstance(cell, TextCell):
        shown = code(cell.text) if cell.tone == "code" else text(cell.text)
        shown = f"**{shown}**" if cell.tone == "bad" else shown
        badges = [badge if badge[0] in "×?" else f"**{text(badge)}**" for badge in cell.badges]
        shown = " ".join([shown, *badges])
    elif isinstance(cell, (tuple, Curve)):
        shown = ""
    else:
        shown = "–" if cell is None else text(gib(cell) if isinstance(cell, int) else cell)
    if line.kind == "total" and shown:
        shown = f"**{shown}**"
    return "&nbsp;&nbsp;" * (len(line.path) - 1) + shown if not place else shown
