"""What would lower the peak, for a terminal: for ``memprof advise``, and ``memprof report --advise``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from memprof.reports.model import Advice, Advised, Document
from memprof.reports.terminal import abilities, console_of, text_of, write_to
from memprof.reports.text import gib

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_advice", "print_changes", "render_advice"]


def print_advice(document: Document, stream: TextIO | None = None) -> None:
    """Print to ``stream`` (standard output), as wide as it is."""
    stream = stream or sys.stdout
    write_to(stream, render_advice(document, *abilities(stream)))


def print_changes(document: Document, stream: TextIO | None = None) -> None:
    """Print the changes alone, below a table that says the rest."""
    stream = stream or sys.stdout
    console = console_of(*abilities(stream))
    _print_advised(console, document.advice)
    write_to(stream, text_of(console))


def render_advice(document: Document, width: int = 100, colour: bool = False) -> str:
    """The peak in a line, the set that fits where one was asked for, and every change with its setting and costs."""
    from rich.text import Text

    console = console_of(width, colour)
    summary, advised = document.summary, document.advice
    console.print(Text(document.title, style="bold"))
    line = Text.assemble(f"{summary.peak_word}: ", (f"{gib(summary.peak_bytes)} GiB", "bold"), f" in {summary.where}")
    console.print(line)
    _print_advised(console, advised)
    if advised.changes:
        console.print()
        console.print(Text(advised.first, style="bold"))
    for note in document.notes:
        console.print(Text(f"Note: {note}", style="dim"))
    return text_of(console)


def _print_advised(console: Console, advised: Advised) -> None:
    from rich.text import Text

    if (together := advised.combination) is not None:
        console.print()
        console.print(Text(together.sentence, style="bold"))
        for setting in together.settings:
            console.print(Text(f"  {setting}"))
    console.print()
    if not advised.changes:
        console.print(Text("No change of its settings is known that would lower this peak."))
    else:
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
