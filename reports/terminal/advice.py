"""Draw what would lower a peak for a terminal: the changes, with what each saves and costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memprof.reports.document.advice import NOTHING_KNOWN
from memprof.reports.document.model import Advice, Advised, Document
from memprof.reports.document.text import gib
from memprof.reports.terminal.elements import print_headline
from memprof.reports.terminal.report import render_terminal
from memprof.reports.terminal.screen import console_of, text_of

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["render_advice", "render_report_and_changes"]


def render_advice(document: Document, width: int = 100, colour: bool = False) -> str:
    """Render the peak in a line, the set that fits where one was asked for, and every change."""
    from rich.text import Text

    console = console_of(width, colour)
    advised = document.advice
    print_headline(console, document.headline)
    console.print()
    console.print(Text(document.title, style="bold"))
    console.print(Text(" · ".join(document.subtitle), style="dim"))
    _print_advised(console, advised)
    for note in document.notes:
        console.print(Text(f"Note: {note}", style="dim"))
    return text_of(console)


def render_report_and_changes(document: Document, width: int = 100, colour: bool = False) -> str:
    """Render the report and below it every change; the report names only the first."""
    console = console_of(width, colour)
    _print_advised(console, document.advice)
    return render_terminal(document, width, colour) + text_of(console)


def _print_advised(console: Console, advised: Advised) -> None:
    from rich.text import Text

    if (together := advised.combination) is not None:
        console.print()
        console.print(Text(together.sentence, style="bold"))
        for setting in together.settings:
            console.print(Text(f"  {setting}"))
    console.print()
    if not advised.changes:
        console.print(Text(NOTHING_KNOWN))
        return
    console.print(Text(f"What would lower the peak, {advised.basis}:", style="dim"))
    digits = max(len(gib(a.saves_bytes)) for a in advised.changes)
    for change in advised.changes:
        _print_change(console, change, digits)


def _print_change(console: Console, change: Advice, digits: int) -> None:
    from rich.table import Table
    from rich.text import Text

    exact = ", same gradients" if change.exact else ""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True, min_width=digits + 4)
    table.add_column()
    table.add_row(
        Text(f"{gib(change.saves_bytes)} GiB", style="bold"),
        Text(f"{change.action} ({change.basis}{exact})", style="bold"),
    )
    words = " ".join(w for w in (change.costs, change.limit, change.also) if w)
    for line, style in ((change.setting, ""), (words, "dim")):
        if line:
            table.add_row("", Text(line, style=style))
    console.print(table)
