"""Draw an answer for a terminal: text of a given width, categories by letter or colour."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memprof.reports.document.blocks import (
    Bars,
    Block,
    Code,
    FactsBlock,
    HeadlineBlock,
    Notes,
    Paragraph,
    ReportLayout,
    TableBlock,
)
from memprof.reports.document.text import plain, short_path
from memprof.reports.terminal.bars import bar_lines, swatch
from memprof.reports.terminal.screen import console_of, text_of
from memprof.reports.terminal.table import draw_table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_STYLES = {"strong": "bold", "muted": "dim", "bad": "bold red"}


def draw(sheet: ReportLayout, width: int = 100, colour: bool = False) -> str:
    """Draw an answer as text of at most ``width`` columns; code alone may be wider."""
    from rich.text import Text

    console = console_of(width, colour)
    sections = [[block for block in section if block is not None and "t" in block.on] for section in sheet.sections]
    if sheet.headline is not None:
        console.print(*_block(sheet.headline, width, colour), sep="\n")
        console.print()
    if sheet.title:
        console.print(Text(plain(sheet.title), style="bold"))
    if sheet.subtitle:
        console.print(Text(plain(" · ".join(sheet.subtitle)), style="dim"))
    for number, section in enumerate(sections):
        if section and number:
            console.print()
        for block in section:
            for line in _block(block, width, colour):
                # rich joins texts it is handed, and forgets how each is to be broken.
                how = {"no_wrap": line.no_wrap, "overflow": line.overflow} if isinstance(line, Text) else {}
                console.print(line, crop=False, **how)  # type: ignore[arg-type]
    return text_of(console)


def _block(block: Block, width: int, colour: bool) -> Iterator[RenderableType]:
    from rich.text import Text

    if isinstance(block, HeadlineBlock):
        yield Text(plain(block.verdict), style="bold red" if block.bad else "bold")
        # What to try is the third line at the latest: a cause of several lines comes after it.
        parts = [(block.cause, ""), (block.action, "bold"), (block.assumed, "dim")]
        if len(block.cause) > width and not block.verdict.startswith("Out "):
            parts[:2] = parts[1::-1]
        for words, style in parts:
            yield from [Text(plain(words), style=style)] if words else []
    elif isinstance(block, Paragraph):
        yield _said(block, colour)
    elif isinstance(block, FactsBlock):
        for fact in block.facts:
            note = f"  {plain(fact.note)}" if fact.note else ""
            yield Text.assemble(f"{plain(fact.label)}: ", (plain(fact.value), "bold"), (note, "dim"))
    elif isinstance(block, Bars):
        yield from bar_lines(block, width, colour)
    elif isinstance(block, TableBlock):
        yield from draw_table(block, width, colour)
    elif isinstance(block, Code):
        room = width - block.indent
        for words in map(plain, block.lines):
            shown = _shortened(words, room) if block.paths else words
            yield Text(" " * block.indent + shown, no_wrap=True, overflow="ellipsis" if block.paths else "ignore")
    elif isinstance(block, Notes):
        yield from (Text(f"{block.word}{plain(note)}", style="dim") for note in block.notes)


def _said(block: Paragraph, colour: bool) -> RenderableType:
    from rich.padding import Padding
    from rich.text import Text

    before: list[Text | str] = [swatch(block.category, colour), " "] if block.category else []
    words = (plain(block.lead), "bold"), (plain(block.text), _STYLES.get(block.tone, "")), (plain(block.after), "dim")
    return Padding(Text.assemble(*before, *words), (0, 0, 0, block.indent))


def _shortened(frame: str, room: int) -> str:
    """Leave out the beginning of a path that is too long: the line and the function are what a reader looks for."""
    for keep in range(frame.count("/"), 0, -1) if len(frame) > room else ():
        if len(short := f"…/{short_path(frame, keep)}") <= room:
            return short
    return frame
