"""A report: the peak and its bar, tables of rows, ranks, phases and allocations, the checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memprof.reports.answers.advice import advice_sections
from memprof.reports.document.blocks import (
    BarPart,
    Bars,
    Block,
    Code,
    Column,
    FactsBlock,
    Notes,
    Paragraph,
    ReportLayout,
    TableBlock,
    TableRow,
    TextCell,
    table,
)  # fmt: skip
from memprof.reports.document.build import growth_words, has_trend, oom_sentence
from memprof.reports.document.model import AllocationRow, Document, RankRow, RanksView, Room
from memprof.reports.document.outside_torch import outside_facts
from memprof.reports.document.page_title import subtitle_of
from memprof.reports.document.prediction import lengths_table, needs_table
from memprof.reports.document.ranks import recordings_table
from memprof.reports.document.tables import component_table, evidence_bytes, phase_table, unused_words
from memprof.reports.document.text import short_path, thousands

from memprof.report import Report
from memprof.units import gib, percent

# Of more ranks the fullest are listed on a terminal; Markdown lists so many.
_MOST_RANKS, _FULLEST, _MOST_IN_MARKDOWN = 16, 8, 32
# Up to so many lines of digits show all ranks.
_STRIP, _DIGITS = 11, 48
_MOST_ALLOCATIONS = 10

Section = tuple["Block | None", ...]


def report(document: Document) -> ReportLayout:
    """Show everything but the changes, of which the headline names the first; Markdown lists them too."""
    return _sheet(document, "m")


def report_and_changes(document: Document) -> ReportLayout:
    """Show everything, the changes last."""
    return _sheet(document, "tm")


def short_report(document: Document) -> ReportLayout:
    """Show the peak, its bar and the rows: what a training run ends with."""
    return _headed(document, (*_summary(document, facts=False), _components(document)))


def _components(document: Document) -> Section:
    unused = unused_words(document.rows)
    rows = component_table(document.rows, document.summary.moment)
    return rows, Paragraph(unused, tone="muted") if unused else None


def _sheet(document: Document, changes: str) -> ReportLayout:
    found, moment = document.report, document.summary.moment
    sections = [*_summary(document), *_prediction(found), _components(document)]
    listed = largest(document.allocations, moment)
    sections += [_recordings(recordings_table(found)), (phase_table(found),), (listed,)]
    advice = advice_sections(found, changes, nothing="t" if "t" in changes else "")
    closing = (_closing(document), *advice) if "t" in changes else (*advice, _closing(document))
    return _headed(document, (*sections, *closing))


def _headed(document: Document, sections: tuple[Section, ...]) -> ReportLayout:
    return ReportLayout(sections, document.title, subtitle_of(document.report), document.headline)


def _summary(document: Document, facts: bool = True) -> tuple[Section, ...]:
    summary, room, failed = document.summary, document.room, document.report.oom
    parts = (*summary.bar, *summary.rest)
    guessed = (summary.guessed,) if summary.guessed else ()
    blocks: list[Block | None] = []
    if not document.headline.verdict.startswith(summary.peak_word):
        share = (
            f", {percent(summary.peak_bytes, summary.capacity_bytes)} of the device" if summary.capacity_bytes else ""
        )
        lead = f"{summary.peak_word}: {gib(summary.peak_bytes)} GiB"
        blocks.append(Paragraph(f" in {summary.where}{share}", lead=lead))
    blocks.append(Bars((("", parts, ""),), summary.scale_bytes, figures=True))
    blocks.append(FactsBlock(guessed, on="t") if guessed else None)
    if room is not None:
        blocks.append(Paragraph(room.sentence, lead="How far from out of memory: "))
        blocks.append(_room_bar(room) if facts or failed else None)
    if facts:
        blocks += [FactsBlock(summary.facts, on="t"), FactsBlock((*summary.facts, *guessed), on="m")]
    oom = Paragraph(oom_sentence(failed), tone="quote") if failed else None
    if document.ranks is None:
        return ((oom, *blocks),)
    return ((oom,), _ranks(document.ranks), (Paragraph("", lead=f"{document.ranks.in_full}:"), *blocks))


def _room_bar(room: Room) -> Bars:
    return Bars((("", room.parts, ""),), room.scale_bytes, room.capacity_bytes, figures=True)


def _prediction(report: Report) -> tuple[Section, ...]:
    """Show what each phase needs, and what other lengths need."""
    fit, lengths, error = report.fit, report.lengths, report.expected_error
    if not (fit or lengths or error):
        return ()
    said = (Paragraph(lengths.sentence), lengths_table(lengths.points)) if lengths else ()
    return (needs_table(fit),), (*said, Paragraph(error.sentence, on="m") if error else None)


def _ranks(ranks: RanksView) -> Section:
    scale = max((r.peak_bytes for r in ranks.rows), default=0)
    most = _MOST_RANKS if len(ranks.rows) <= _MOST_RANKS else _FULLEST
    columns = [Column("Rank", whole=True), *([Column("Node", on="t", wide=True)] if ranks.several_nodes else [])]
    columns += [Column("Peak in"), Column("GiB", right=True), Column("", on="t", wide=True)]
    columns += [Column(label, right=True, on="m") for _, label in ranks.columns]
    lines = [
        _rank(ranks, row, ("t" if i < most else "") + ("m" if i < _MOST_IN_MARKDOWN else ""))
        for i, row in enumerate(ranks.rows)
    ]
    found = f"{ranks.finding[:1].upper()}{ranks.finding[1:]}. " if ranks.finding else ""
    missing = Paragraph(ranks.missing, tone="bad") if ranks.missing else None
    blocks: list[Block | None] = [Paragraph(ranks.sentence, lead=found), missing]
    blocks.append(TableBlock(tuple(columns), tuple(lines), scale=scale or 1, units=False))
    if rest := ranks.rows[most:]:
        low, high = gib(min(r.peak_bytes for r in rest)), gib(max(r.peak_bytes for r in rest))
        words = f"{thousands(len(rest))} more, from {high} down to {low} GiB"
        blocks += [Paragraph(words, tone="muted", on="t"), *_strip(ranks)]
    return (*blocks, *(Paragraph(sentence) for sentence in ranks.differences))


def _rank(ranks: RanksView, row: RankRow, on: str) -> TableRow:
    named = zip(ranks.columns, row.cells, strict=True)
    bar = tuple(BarPart(c, label, cell.bytes) for (c, label), cell in named if cell.bytes)
    name = TextCell(str(row.rank), badges=("out of memory",) if row.oom else ())
    node = (row.node,) if ranks.several_nodes else ()
    return TableRow((name, *node, row.where, row.peak_bytes, bar, *(c.bytes for c in row.cells)), row.shown, on=on)


def _strip(ranks: RanksView) -> list[Block]:
    """Show a digit for each rank's peak, in the order of their numbers."""
    shades = {row.rank: str(row.shade) for row in ranks.rows}
    digits = "".join(shades.get(rank, ".") for rank in range(ranks.world_size))
    if set(shades.values()) == {"0"} or len(digits) > _STRIP * _DIGITS:
        return []
    lines = tuple(f"{first:>6} {digits[first : first + _DIGITS]}" for first in range(0, len(digits), _DIGITS))
    return [
        Paragraph("Peaks of all ranks in order: 1 is the lowest, 8 the highest, . missing", on="t"),
        Code(lines, on="t"),
    ]


def _recordings(dumps: TableBlock | None) -> Section:
    """Show the dumps of the folder; of many the first, and how many there are."""
    if dumps is None:
        return ()
    rest = len(dumps.lines) - _MOST_RANKS
    more = f"{thousands(rest)} more dumps; -o FILE.html lists all"
    first = replace(dumps.part(0, _MOST_RANKS), on="t")
    return first, Paragraph(more, tone="muted", on="t") if rest > 0 else None, replace(dumps, on="m")


def largest(allocations: Sequence[AllocationRow], moment: str = "peak") -> TableBlock | None:
    """Show the largest allocations: sizes, evidence and line numbers are never cut, names give way."""
    shown = allocations[:_MOST_ALLOCATIONS]
    sited = any(row.site for row in shown)
    columns = (
        Column(f"Largest alive at the {moment}", short="Largest alive", least=16, cut_left=True),
        Column("Category", on="m"), Column("GiB", right=True), Column("Known by", whole=True, on="t"),
        Column("How it is known", on="m"),
        *((Column("Allocated at", keeps_first=True, rank=1, on="t"),) if sited else ()),
        Column("Allocated at", on="m"),
    )  # fmt: skip
    return table(columns, [_allocation(row, sited) for row in shown])


def _allocation(a: AllocationRow, sited: bool) -> TableRow:
    badges = ((f"×{thousands(a.count)}",) if a.count > 1 else ()) + (("?",) if a.guessed else ())
    name = TextCell(a.name or a.shape or a.detail or a.label.lower(), "code", badges, a.category)
    place = (short_path(a.site, 1),) if sited else ()
    made = TextCell(a.site, "code") if a.site else ""
    return TableRow((name, a.label, a.bytes, a.group.evidence, a.why, *place, made))


def _closing(document: Document) -> Section:
    report, growth = document.report, document.report.growth
    whole = report.peak.active_bytes or 1
    known = ", ".join(f"{kind} {100 * n / whole:.1f}%" for kind, n in evidence_bytes(report.peak))
    wrong = "; ".join(f"{c.label}: {c.value}, {c.note}" for c in document.checks if c.ok is False)
    sums = (
        Paragraph(f"Does it add up? No: {wrong}.", tone="bad")
        if wrong
        else Paragraph("Does it add up? Yes, to the byte.")
    )
    facts = outside_facts(report.outside)
    outside = tuple(fact._replace(label=f"Non-PyTorch memory, {fact.label.lower()}") for fact in facts)
    return (
        Paragraph(f"How it is known: {known}") if known else None,
        sums,
        Paragraph(growth_words(growth)) if growth and has_trend(growth) else None,
        FactsBlock(outside) if outside else None,
        Notes(document.notes) if document.notes else None,
    )
