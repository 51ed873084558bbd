"""A report: the peak and its bar, tables of rows, ranks, phases and allocations, the checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from memprof.reports.answers.advice import advice_sections
from memprof.reports.document.blocks import (
    Bars,
    Block,
    Code,
    Column,
    Facts,
    Line,
    Notes,
    Part,
    Said,
    Sheet,
    Table,
    Words,
    table,
)  # fmt: skip
from memprof.reports.document.model import Allocation, Document, RankRow, Ranks
from memprof.reports.document.tables import component_table
from memprof.reports.document.text import short_path, thousands

from memprof.units import gib, percent

# Of more ranks the fullest are listed on a terminal; Markdown lists so many.
_MOST_RANKS, _FULLEST, _MOST_IN_MARKDOWN = 16, 8, 32
# Up to so many lines of digits show all ranks.
_STRIP, _DIGITS = 11, 48
_MOST_ALLOCATIONS = 10

Section = tuple["Block | None", ...]


def report(document: Document) -> Sheet:
    """Show everything but the changes, of which the headline names the first; Markdown lists them too."""
    return _sheet(document, "m")


def report_and_changes(document: Document) -> Sheet:
    """Show everything, the changes last."""
    return _sheet(document, "tm")


def short_report(document: Document) -> Sheet:
    """Show the peak, its bar and the rows: what a training run ends with."""
    rows = component_table(document.rows, document.summary.moment)
    return Sheet((*_summary(document, facts=False), (rows,)), **_head(document))


def _sheet(document: Document, changes: str) -> Sheet:
    moment = document.summary.moment
    sections = [*_summary(document), *_prediction(document), (component_table(document.rows, moment),)]
    listed = largest(document.allocations, moment)
    sections += [_recordings(document.recordings), (document.phases,), (listed,)]
    advice = advice_sections(document.advice, changes, nothing="t" if "t" in changes else "")
    if "t" in changes:
        return Sheet((*sections, _closing(document), *advice), **_head(document))
    return Sheet((*sections, *advice, _closing(document)), **_head(document))


def _head(document: Document) -> dict[str, Any]:
    return {"title": document.title, "subtitle": document.subtitle, "headline": document.headline}


def _summary(document: Document, facts: bool = True) -> tuple[Section, ...]:
    summary, room = document.summary, document.room
    parts = (*summary.bar, *summary.rest)
    guessed = (summary.guessed,) if summary.guessed else ()
    blocks: list[Block | None] = []
    if not document.headline.verdict.startswith(summary.peak_word):
        share = (
            f", {percent(summary.peak_bytes, summary.capacity_bytes)} of the device" if summary.capacity_bytes else ""
        )
        lead = f"{summary.peak_word}: {gib(summary.peak_bytes)} GiB"
        blocks.append(Said(f" in {summary.where}{share}", lead=lead))
    blocks.append(Bars((("", parts, ""),), summary.scale_bytes, figures=True))
    blocks.append(Facts(guessed, on="t") if guessed else None)
    if room is not None:
        blocks.append(Said(room.sentence, lead="How far from out of memory: "))
        drawn = facts or document.oom is not None
        blocks.append(_room_bar(document) if drawn else None)
    if facts:
        blocks += [Facts(summary.facts, on="t"), Facts((*summary.facts, *guessed), on="m")]
    oom = Said(document.oom.sentence, tone="quote") if document.oom else None
    if document.ranks is None:
        return ((oom, *blocks),)
    return ((oom,), _ranks(document.ranks), (Said("", lead=f"{document.ranks.in_full}:"), *blocks))


def _room_bar(document: Document) -> Bars:
    room = document.room
    assert room is not None
    return Bars((("", room.parts, ""),), room.scale_bytes, room.capacity_bytes, figures=True)


def _prediction(document: Document) -> tuple[Section, ...]:
    """Show what each phase needs, and what other lengths need."""
    found = document.prediction
    if found is None:
        return ()
    said = Said(found.lengths_sentence) if found.lengths_sentence else None
    return (found.needs,), (said, found.lengths, Said(found.error, on="m") if found.error else None)


def _ranks(ranks: Ranks) -> Section:
    scale = max((r.peak_bytes for r in ranks.rows), default=0)
    most = _MOST_RANKS if len(ranks.rows) <= _MOST_RANKS else _FULLEST
    columns = [Column("Rank", whole=True), *([Column("Node", on="t", wide=True)] if ranks.several_nodes else [])]
    columns += [Column("Peak in"), Column("GiB", right=True), Column("", on="t", wide=True)]
    columns += [Column(label, right=True, on="m") for _, label in ranks.columns]
    lines = [
        _rank(ranks, row, ("t" if i < most else "") + ("m" if i < _MOST_IN_MARKDOWN else ""))
        for i, row in enumerate(ranks.rows)
    ]
    blocks: list[Block | None] = [Said(ranks.sentence), Said(ranks.missing, tone="bad") if ranks.missing else None]
    blocks.append(Table(tuple(columns), tuple(lines), scale=scale or 1, units=False))
    if rest := ranks.rows[most:]:
        low, high = gib(min(r.peak_bytes for r in rest)), gib(max(r.peak_bytes for r in rest))
        words = f"{thousands(len(rest))} more, from {high} down to {low} GiB"
        blocks += [Said(words, tone="muted", on="t"), *_strip(ranks)]
    return (*blocks, *(Said(sentence) for sentence in ranks.differences))


def _rank(ranks: Ranks, row: RankRow, on: str) -> Line:
    named = zip(ranks.columns, row.cells, strict=True)
    bar = tuple(Part(c, label, cell.bytes) for (c, label), cell in named if cell.bytes)
    name = Words(str(row.rank), badges=("out of memory",) if row.oom else ())
    node = (row.node,) if ranks.several_nodes else ()
    return Line((name, *node, row.where, row.peak_bytes, bar, *(c.bytes for c in row.cells)), row.shown, on=on)


def _strip(ranks: Ranks) -> list[Block]:
    """Show a digit for each rank's peak, in the order of their numbers."""
    shades = {row.rank: str(row.shade) for row in ranks.rows}
    digits = "".join(shades.get(rank, ".") for rank in range(ranks.world_size))
    if set(shades.values()) == {"0"} or len(digits) > _STRIP * _DIGITS:
        return []
    lines = tuple(f"{first:>6} {digits[first : first + _DIGITS]}" for first in range(0, len(digits), _DIGITS))
    return [Said("Peaks of all ranks in order: 1 is the lowest, 8 the highest, . missing", on="t"), Code(lines, on="t")]


def _recordings(dumps: Table | None) -> Section:
    """Show the dumps of the folder; of many the first, and how many there are."""
    if dumps is None:
        return ()
    rest = len(dumps.lines) - _MOST_RANKS
    more = f"{thousands(rest)} more dumps; -o FILE.html lists all"
    first = replace(dumps.part(0, _MOST_RANKS), on="t")
    return first, Said(more, tone="muted", on="t") if rest > 0 else None, replace(dumps, on="m")


def largest(allocations: Sequence[Allocation], moment: str = "peak") -> Table | None:
    """Show the largest allocations: sizes, evidence and line numbers are never cut, names give way."""
    shown = allocations[:_MOST_ALLOCATIONS]
    site = "|Made at=1@t" if any(a.site for a in shown) else ""
    heads = f"Largest alive at the {moment}<|Category@m|GiB>|Known by!@t|How it is known@m{site}|Made at@m"
    found = table(heads, [_allocation(a, bool(site)) for a in shown])
    if found is None:
        return None
    first, *others = found.columns
    return replace(found, columns=(first._replace(short="Largest alive", least=16), *others))


def _allocation(a: Allocation, sited: bool) -> Line:
    badges = ((f"×{thousands(a.count)}",) if a.count > 1 else ()) + (("?",) if a.guessed else ())
    name = Words(a.name or a.shape or a.detail or a.category_label.lower(), "code", badges, a.category)
    place = (short_path(a.site, 1),) if sited else ()
    return Line((name, a.category_label, a.bytes, a.evidence, a.why, *place, Words(a.site, "code") if a.site else ""))


def _closing(document: Document) -> Section:
    known = ", ".join(f"{e.id} {100 * e.share:.1f} %" for e in document.evidence)
    wrong = "; ".join(f"{c.label}: {c.value}, {c.note}" for c in document.adds_up.checks if c.ok is False)
    sums = Said(f"Does it add up? No: {wrong}.", tone="bad") if wrong else Said("Does it add up? Yes, to the byte.")
    outside = tuple(fact._replace(label=f"Outside torch, {fact.label.lower()}") for fact in document.outside)
    return (
        Said(f"How it is known: {known}") if known else None,
        sums,
        Said(document.steps.sentence) if document.steps else None,
        Facts(outside) if outside else None,
        Notes(document.notes) if document.notes else None,
    )
