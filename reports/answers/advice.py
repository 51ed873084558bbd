"""What would lower a peak: the set that fits where a card was asked about, and every change."""

from __future__ import annotations

from memprof.reports.document.advice import NOTHING_KNOWN
from memprof.reports.document.blocks import Block, Code, Column, Line, Notes, Said, Sheet, Table, Words, table
from memprof.reports.document.model import Advice, Advised, Document

from memprof.units import gib


def advice(document: Document) -> Sheet:
    """Show the headline and the changes, and nothing else of the report."""
    *sections, last = advice_sections(document.advice, "tm", nothing="tm")
    notes = Notes(document.notes) if document.notes else None
    return Sheet(((), *sections, (*last, notes)), document.title, document.subtitle, document.headline)


def advice_sections(advised: Advised, on: str, nothing: str) -> tuple[tuple[Block | None, ...], ...]:
    """Show the set that fits, then every change; where there is none, say so on the ``nothing`` screens."""
    together = advised.combination
    first: tuple[Block, ...] = ()
    if together is not None:
        code = (Code(together.settings, indent=2, on=on),) if together.settings else ()
        first = (Said(together.sentence, tone="strong", on=on), *code)
    if not advised.changes:
        return first, (Said(NOTHING_KNOWN, on=nothing),)
    title = f"What would lower the peak, {advised.basis}"
    columns = Column("", right=True), Column(title, wraps=True)
    lines = tuple(line for change in advised.changes for line in _listed(change))
    listed = Table(columns, lines, on=on.replace("m", ""))
    heads = "Saves>|Basis|What would lower the peak|Setting|Same gradients|Costs"
    rows = table(heads, [_row(change) for change in advised.changes], on=on.replace("t", ""))
    basis = f"{advised.basis[:1].upper()}{advised.basis[1:]}."
    return first, (listed, rows, Said(basis, on=on.replace("t", "")))


def _words(change: Advice) -> str:
    return " ".join(words for words in (change.costs, change.limit, change.also) if words)


def _listed(change: Advice) -> list[Line]:
    """List a change for a terminal: what it is, what to set, what it costs."""
    exact = ", same gradients" if change.exact else ""
    name = Words(f"{change.action} ({change.basis}{exact})", "strong")
    setting = [Line(("", change.setting))] if change.setting else []
    return [Line((f"{gib(change.saves_bytes)} GiB", name)), *setting, Line(("", Words(_words(change), "muted")))]


def _row(change: Advice) -> Line:
    setting = Words(change.setting, "code") if change.setting else ""
    exact = "yes" if change.exact else "no"
    return Line((change.saves_bytes, change.basis, change.action, setting, exact, _words(change)))
