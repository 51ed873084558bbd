"""Explained out-of-memory texts: for each failure its numbers, its cause and what to try."""

from __future__ import annotations

from memprof.reports.document.blocks import (
    Block,
    Column,
    HeadlineBlock,
    Notes,
    Paragraph,
    ReportLayout,
    TableRow,
    TextCell,
    table,
)
from memprof.reports.document.text import plain

from memprof.report.oom import ExplainedFailure, ExplainedText
from memprof.units import format_bytes

_MOST_LISTED = 8
_NUMBERS = Column("Figure", whole=True), Column("Size", right=True, whole=True), Column("What it is", wraps=True)
_TRIED = "", Column("Then, in this order", wraps=True), Column("Why", on="m")
_EVIDENCE = Column("Fact"), Column("Value", wraps=True), Column("What it is"), Column("Line", right=True)


def failures(answer: ExplainedText) -> ReportLayout:
    """Show every failure, then the notes."""
    notes = tuple(plain(note) for note in answer.notes)
    return ReportLayout((*map(_failure, answer.failures), (Notes(notes) if notes else None,)))


def _failure(failure: ExplainedFailure) -> tuple[Block | None, ...]:
    found = failure.headline
    numbers = [TableRow((row.name, format_bytes(row.bytes), plain(row.meaning))) for row in failure.numbers]
    tried: list[TableRow] = []
    for i, row in list(enumerate(failure.suggestions, 1))[1:]:
        action, why = TextCell(plain(row.action), "code"), plain(row.why)
        tried += [TableRow((f"{i}.", action, ""), on="t"), TableRow(("", TextCell(why, "muted"), ""), on="t")]
        tried.append(TableRow((f"{i}.", action, why), on="m"))
    return (
        HeadlineBlock(plain(found.verdict), plain(found.cause), plain(found.action)),
        table(_NUMBERS, [*numbers, *_processes(failure)]),
        Paragraph(f"{failure.sum}.") if failure.sum else None,
        *(Paragraph(f"Contradiction: {plain(words)}.") for words in failure.contradictions),
        Paragraph(f"Not used by this answer: {_unread(failure)}.") if failure.unread else None,
        table(_TRIED, tried),
        table(_EVIDENCE, _evidence(failure)),
    )


def _unread(failure: ExplainedFailure) -> str:
    """List the figures of the text that were not read."""
    return ", ".join(
        f"{plain(figure.text)} ({plain(figure.label)}{', ' if figure.label else ''}line {figure.line})"
        for figure in failure.unread
    )


def _evidence(failure: ExplainedFailure) -> list[TableRow]:
    """List what was read from the text, if that was asked for."""
    return [TableRow((row.name, plain(row.value), row.says, str(row.line or ""))) for row in failure.evidence]


def _processes(failure: ExplainedFailure) -> list[TableRow]:
    """List the processes, the rest of many in one row."""
    listed = failure.processes
    lines = [
        TableRow((f"process {p.pid}", format_bytes(p.bytes) if p.bytes else "not told", "on the same device"))
        for p in listed[:_MOST_LISTED]
    ]
    rest = len(listed) - _MOST_LISTED
    return [*lines, TableRow((f"{rest} more", "", "processes on the same device"))] if rest > 0 else lines
