"""What would lower a peak: the set that fits the GPU of ``--gpu``, and every change."""

from __future__ import annotations

from memprof.reports.document.advice import NOTHING_KNOWN, advice_basis, advice_words
from memprof.reports.document.blocks import (
    Block,
    Code,
    Column,
    Notes,
    Paragraph,
    ReportLayout,
    TableBlock,
    TableRow,
    TextCell,
    table,
)
from memprof.reports.document.model import Document
from memprof.reports.document.page_title import subtitle_of

from memprof.report import Report
from memprof.report.advice import Advice
from memprof.units import gib


def advice(document: Document) -> ReportLayout:
    """Show the headline and the changes, and nothing else of the report."""
    *sections, last = advice_sections(document.report, "tm", nothing="tm")
    notes = Notes(document.notes) if document.notes else None
    return ReportLayout(
        ((), *sections, (*last, notes)), document.title, subtitle_of(document.report), document.headline
    )


_COLUMNS = (Column("Saves", right=True), "Basis", "What would lower the peak", "Setting", "Same gradients", "Costs")


def advice_sections(report: Report, on: str, nothing: str) -> tuple[tuple[Block | None, ...], ...]:
    """Show the set that fits, then every change; if there is none, say so on the ``nothing`` screens."""
    together = report.combination
    first: tuple[Block, ...] = ()
    if together is not None:
        settings = tuple(change.setting for change in together.changes)
        code = (Code(settings, indent=2, on=on),) if settings else ()
        first = (Paragraph(together.sentence, tone="strong", on=on), *code)
    if not report.advice:
        return first, (Paragraph(NOTHING_KNOWN, on=nothing),)
    basis = advice_basis(report)
    columns = Column("", right=True), Column(f"What would lower the peak, {basis}", wraps=True)
    lines = tuple(line for change in report.advice for line in _listed(change))
    listed = TableBlock(columns, lines, on=on.replace("m", ""))
    rows = table(_COLUMNS, [_row(change) for change in report.advice], on=on.replace("t", ""))
    return first, (listed, rows, Paragraph(f"{basis[:1].upper()}{basis[1:]}.", on=on.replace("t", "")))


def _listed(change: Advice) -> list[TableRow]:
    """List a change for a terminal: what it is, what to set, what it costs."""
    exact = ", same gradients" if change.exact else ""
    name = TextCell(f"{change.action} ({change.basis}{exact})", "strong")
    setting = [TableRow(("", change.setting))] if change.setting else []
    return [
        TableRow((f"{gib(change.saves_bytes)} GiB", name)),
        *setting,
        TableRow(("", TextCell(advice_words(change), "muted"))),
    ]


def _row(change: Advice) -> TableRow:
    setting = TextCell(change.setting, "code") if change.setting else ""
    exact = "yes" if change.exact else "no"
    return TableRow((change.saves_bytes, change.basis, change.action, setting, exact, advice_words(change)))
