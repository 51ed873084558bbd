"""The same document for a terminal: bars and tables, letters instead of colours where there are none."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import StringIO
from typing import TYPE_CHECKING, TextIO

from memprof.reports.document.model import Advice, Advised, Allocation, Document, Part, Prediction, RankRow, Ranks, Row
from memprof.reports.document.text import duration, gib, percent, short_path, thousands
from memprof.reports.palette import DARK, FALLBACK

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "abilities",
    "console_of",
    "draw_bar",
    "legend",
    "print_advice",
    "print_allocations",
    "print_changes",
    "print_document",
    "print_prediction",
    "print_ranks",
    "render",
    "render_advice",
    "render_allocations",
    "render_terminal",
    "swatch",
    "table_of",
    "text_of",
    "write_to",
]

LETTERS = {
    "weights": "W", "adapters": "A", "weight_casts": "C", "reference_model": "R", "reward_model": "J",
    "value_model": "V", "gradients": "G", "optimizer_state": "O", "activations": "X", "activation_gradients": "Y",
    "loss_logits": "L", "kv_cache": "K", "inference_engine": "E", "inputs": "I", "temporaries": "T",
    "communication": "Z", "workspace": "B", "unattributed": "?", "cached": "-", "inactive_split": "~",
    "private_pools": "=", "non_torch": "N", "free": ".",
    "training": "M",
}  # fmt: skip

_ASCII = str.maketrans("×·–−µ█■›³⁰\u202f", "x---u##>30 ", "") | str.maketrans({"…": "..."})


def print_document(document: Document, stream: TextIO | None = None) -> None:
    """Print to ``stream`` (standard output): its width, its colours, and ASCII where it knows nothing else."""
    stream = stream or sys.stdout
    write_to(stream, render_terminal(document, *abilities(stream)))


def render(document: Document) -> str:
    """A short form for standard output as it is now: the peak, its bar and the rows; what a training run ends with."""
    width, colour = abilities(sys.stdout)
    console = console_of(width, colour)
    _print_summary(console, document, colour, facts=False)
    console.print()
    console.print(_components(document, width, colour))
    if document.ranks:
        console.print()
        _print_ranks(console, document, colour)
    return text_of(console)


def print_allocations(allocations: Sequence[Allocation], stream: TextIO | None = None) -> None:
    """Print allocations as :func:`print_document` prints a document."""
    stream = stream or sys.stdout
    write_to(stream, render_allocations(allocations, *abilities(stream)))


def abilities(stream: TextIO) -> tuple[int, bool]:
    """``(columns, colour)`` of a stream; a pipe gets 100 columns unless ``COLUMNS`` says otherwise."""
    import os

    from rich.console import Console

    probe = Console(file=stream)
    width = probe.width if probe.is_terminal or "COLUMNS" in os.environ else 100
    return width, probe.color_system is not None and not probe.no_color


def write_to(stream: TextIO, text: str) -> None:
    """Write, with ASCII stand-ins and question marks where the stream's encoding asks for them."""
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower()
    if not encoding.startswith("utf"):
        text = text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
    stream.write(text)
    stream.flush()


def render_terminal(document: Document, width: int = 100, colour: bool = False) -> str:
    """The document as text of at most ``width`` columns; below 80 the bars and shares are left out."""
    console = console_of(width, colour)
    _print_summary(console, document, colour)
    if document.prediction and (document.prediction.needs or document.prediction.lengths):
        console.print()
        print_prediction(console, document.prediction)
    console.print()
    console.print(_components(document, width, colour))
    if document.ranks:
        console.print()
        _print_ranks(console, document, colour)
    if document.phases:
        console.print()
        console.print(_phases(document, width, colour))
    if document.allocations:
        console.print()
        console.print(_allocations(document.allocations[:10], width, colour))
    console.print()
    _print_closing(console, document)
    return text_of(console)


def render_allocations(allocations: Sequence[Allocation], width: int = 100, colour: bool = False) -> str:
    """Every allocation with its evidence and its stack: what ``memprof explain`` prints."""
    from rich.text import Text

    console = console_of(width, colour)
    for allocation in allocations:
        head = Text.assemble(swatch(allocation.category, colour), " ", (f"{gib(allocation.bytes)} GiB", "bold"))
        label = allocation.category_label + (f" / {allocation.detail}" if allocation.detail else "")
        head.append(f"  {label}  {allocation.address}  {allocation.phase_label}, alive {allocation.lifetime}")
        console.print(head)
        what = "  ".join(w for w in (allocation.name, allocation.shape) if w)
        if what:
            console.print(Text(f"    {what}"))
        retained = "; outlives the step or phase that made it" if allocation.retained else ""
        retained += f"; held by {', '.join(allocation.held_by)}" if allocation.held_by else ""
        console.print(Text(f"    {allocation.evidence}: {allocation.why}{retained}", style="dim"))
        for frame in allocation.stack:
            console.print(Text(f"      {frame}"), no_wrap=True, overflow="ellipsis")
    return text_of(console)


def console_of(width: int, colour: bool) -> Console:
    """A console that collects text, ``width`` columns wide."""
    from rich.console import Console

    return Console(
        file=StringIO(),
        width=width,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        no_color=not colour,
        legacy_windows=False,
        highlight=False,
        emoji=False,
        markup=False,
    )


def text_of(console: Console) -> str:
    """What a console of :func:`console_of` collected."""
    stream = console.file
    assert isinstance(stream, StringIO)
    return "\n".join(line.rstrip() for line in stream.getvalue().split("\n"))


def _print_summary(console: Console, document: Document, colour: bool, facts: bool = True) -> None:
    from rich.text import Text

    summary = document.summary
    console.print(Text(document.title, style="bold"))
    console.print(Text(" · ".join(document.subtitle), style="dim"))
    if document.oom:
        console.print(Text(document.oom.sentence, style="bold red"))
    console.print()
    line = Text.assemble(f"{summary.peak_word}: ", (f"{gib(summary.peak_bytes)} GiB", "bold"), f" in {summary.where}")
    if summary.capacity_bytes:
        line.append(f", {percent(summary.peak_bytes, summary.capacity_bytes)} of the device")
    console.print(line)
    console.print(Text(summary.cause))
    parts = (*summary.bar, *summary.rest)
    console.print(draw_bar(parts, summary.scale_bytes, console.width - 1, colour))
    for line in legend(parts, console.width - 1, colour):
        console.print(line)
    for fact in summary.facts if facts else ():
        console.print(Text.assemble(f"{fact.label}: ", (fact.value, "bold"), (f"  {fact.note}", "dim")))


def swatch(identifier: str, colour: bool) -> Text:
    """A category's square in its colour, or its letter."""
    from rich.text import Text

    if colour:
        return Text("■", style=_style(identifier))
    return Text(LETTERS.get(identifier, "?"))


def _style(identifier: str) -> str:
    extra = {
        "cached": "#49525d",
        "inactive_split": "#8a929c",
        "private_pools": "#b6a5cf",
        "non_torch": "#6b7480",
        "training": "#8a929c",
    }
    return DARK.get(identifier, extra.get(identifier, "#2a3038" if identifier == "free" else FALLBACK))


def draw_bar(parts: Sequence[Part], scale: int, width: int, colour: bool) -> Text:
    """Parts side by side. Ends are rounded, not widths, so the bar never grows longer than its sum."""
    from rich.text import Text

    bar, done, drawn = Text(no_wrap=True), 0, 0
    for part in parts:
        done += part.bytes
        end = round(width * done / scale) if scale else 0
        if colour:
            bar.append("█" * (end - drawn), style=_style(part.id))
        else:
            bar.append(LETTERS.get(part.id, "?") * (end - drawn))
        drawn = max(drawn, end)
    return bar


def legend(parts: Sequence[Part], width: int, colour: bool, figures: bool = True) -> list[Text]:
    """Entries side by side, as many to a line as fit."""
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


def table_of(*columns: tuple[str, str, bool]) -> Table:
    """A table without lines; each column is ``(heading, justification, may shrink)``."""
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


def _components(document: Document, width: int, colour: bool) -> Table:
    wide = width >= 80
    columns = [("GiB", "left", False), ("At the peak", "right", False)]
    columns += [("", "left", True), ("of peak", "right", False)] if wide else []
    columns.append(("Own peak", "right", False))
    table = table_of(*columns)
    total = document.rows[-1].at_peak
    bar_width = max(width - 70, 10)
    for row in document.rows:
        _add_row(table, row, 0, total, bar_width if wide else 0, colour)
        for child in row.children:
            _add_row(table, child, 1, total, bar_width if wide else 0, colour)
    return table


def _add_row(table: Table, row: Row, level: int, total: int, bar_width: int, colour: bool) -> None:
    from rich.text import Text

    label = Text.assemble("  ", swatch(row.id, colour), f" {row.label}") if level else Text(row.label, style="bold")
    cells: list[Text | str] = [label, gib(row.at_peak)]
    if bar_width:
        part = (Part(row.id, row.label, row.at_peak),)
        shown = level or row.id == "unattributed"
        cells.append(draw_bar(part, total, bar_width, colour) if shown else "")
        cells.append(percent(row.at_peak, total))
    cells.append("–" if row.own_peak is None else gib(row.own_peak))
    table.add_row(*cells, style="bold" if row.id == "total" else None)


def _phases(document: Document, width: int, colour: bool) -> Table:
    wide = width >= 80
    columns = [("Phase", "left", False), ("Time", "right", False), ("Peak", "right", False)]
    columns += [("", "left", True)] if wide else []
    table = table_of(*columns)
    scale = max(p.peak_bytes for p in document.phases)
    for phase in document.phases:
        label = phase.label + (f" ×{phase.count}" if phase.count > 1 else "")
        mark = " peak" if phase.is_peak else ""
        cells: list[Text | str] = [label + mark, duration(phase.total_us), gib(phase.peak_bytes)]
        if wide:
            cells.append(draw_bar(phase.parts, scale, max(width - 52, 10), colour))
        table.add_row(*cells, style="bold" if phase.is_peak else None)
    return table


def _allocations(allocations: Sequence[Allocation], width: int, colour: bool) -> Table:
    from rich.text import Text

    wide = width >= 80
    columns = [("Largest alive at the peak", "left", True), ("GiB", "right", False)]
    columns += [("Known by", "left", False), ("Made at", "left", True)] if wide else []
    table = table_of(*columns)
    for allocation in allocations:
        many = f" ×{thousands(allocation.count)}" if allocation.count > 1 else ""
        name = allocation.name or allocation.shape or allocation.detail or allocation.category_label.lower()
        label = Text.assemble(swatch(allocation.category, colour), f" {name}{many}")
        cells: list[Text | str] = [label, gib(allocation.bytes)]
        if wide:
            cells += [allocation.evidence, Text(short_path(allocation.site, 1))]
        table.add_row(*cells)
    return table


def _print_ranks(console: Console, document: Document, colour: bool) -> None:

    if document.ranks:
        print_ranks(console, document.ranks, colour)


def _print_closing(console: Console, document: Document) -> None:
    from rich.text import Text

    if document.evidence:
        known = ", ".join(f"{e.id} {100 * e.share:.1f} %" for e in document.evidence)
        console.print(Text(f"How it is known: {known}"))
    wrong = [c for c in document.adds_up.checks if c.ok is False]
    if wrong:
        console.print(Text("Does it add up? No:", style="bold red"))
        for check in wrong:
            console.print(Text(f"  {check.label}: {check.value}, {check.note}"))
    else:
        console.print(Text("Does it add up? Yes, to the byte."))
    if document.advice.first:
        console.print(Text(document.advice.first, style="bold"))
    if document.steps:
        console.print(Text(document.steps.sentence))
    for fact in document.outside:
        console.print(
            Text.assemble("Beside torch, ", f"{fact.label.lower()}: ", (fact.value, "bold"), (f"  {fact.note}", "dim"))
        )
    for note in document.notes:
        console.print(Text(f"Note: {note}", style="dim"))


_WORDS = {True: "fits", False: "does not fit", None: "–"}


def print_prediction(console: Console, prediction: Prediction) -> None:
    """The verdict and its tables; narrow ones leave columns out."""
    from rich.text import Text

    if prediction.needs:
        console.print(_phase_needs(prediction))
    if prediction.lengths:
        console.print()
        console.print(Text(prediction.lengths_sentence))
        console.print(_lengths(prediction, console.width))


def _table(*columns: tuple[str, bool]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title, numeric in columns:
        table.add_column(title, justify="right" if numeric else "left", no_wrap=True)
    return table


def _phase_needs(prediction: Prediction) -> Table:
    table = _table(("Does it fit? GiB", False), ("Held", True), ("Needed", True), ("", False))
    for need in prediction.needs:
        word = _WORDS[need.fits] + (" decides" if need.decides else "")
        table.add_row(need.label, gib(need.allocated_bytes), gib(need.needed_bytes), word)
    return table


def _lengths(prediction: Prediction, width: int) -> Table:
    wide = width >= 80
    columns = [("Longest completion", False), ("Tokens", True), ("Steps", True)]
    columns += [("Held", True)] if wide else []
    columns += [("Needed", True), ("", False)]
    columns += [("", False)] if wide else []
    table = _table(*columns)
    for row in prediction.lengths:
        cells = [row.label, thousands(row.tokens), percent(round(1e6 * row.share_below), 1_000_000)]
        cells += [gib(row.peak_bytes)] if wide else []
        cells += [gib(row.needed_bytes), _WORDS[row.fits]]
        cells += ["executed" if row.executed else "between"] if wide else []
        table.add_row(*cells)
    return table


_MOST = 16


def print_ranks(console: Console, ranks: Ranks, colour: bool) -> None:
    """Print the ranks; below 80 columns without bars."""
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

    parts = [
        Part(c, label, cell.bytes) for (c, label), cell in zip(ranks.columns, row.cells, strict=True) if cell.bytes
    ]
    return draw_bar(parts, scale, width, colour)


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
