"""Draw a comparison's page: who needs how much, what was set differently, row by row, and what changed by stack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from memprof.reports.document.build import oom_sentence
from memprof.reports.document.comparison import ChangedStacks, ComparisonDocument, RunColumn
from memprof.reports.html.charts import timelines_section
from memprof.reports.html.elements import (
    Child,
    Markup,
    bar,
    cap_mark,
    draw_table,
    el,
    fact_list,
    join,
    legend,
    notes_section,
    section,
)
from memprof.reports.html.interactive_timeline import MAX_PACKED, timeline_data
from memprof.reports.html.opened import Opened, opened_data
from memprof.reports.html.page import PageData, render_page
from memprof.reports.html.summary import headline_lines, room_bar
from memprof.reports.html.views.difference import difference_section

from memprof.files import write_text
from memprof.units import amount


def write_comparison(comparison: ComparisonDocument, path: Path) -> None:
    """Write a comparison's page, complete or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    write_text(path, render_comparison(comparison))


def render_comparison(comparison: ComparisonDocument) -> str:
    """Render a comparison's page as text."""
    drawn = [c.document for c in comparison.columns if c.document and c.document.timeline]
    opened = [Opened(document, run) for run, document in enumerate(drawn)]
    most = MAX_PACKED // max(len(drawn), 1)
    pairs = zip(drawn, opened, strict=True)
    timelines = tuple(timeline_data(d.timeline, d, most, o) for d, o in pairs if d.timeline)
    data = PageData(
        report=comparison.comparison, timelines=timelines or None, opened=opened_data(opened) if drawn else None
    )
    subtitle = [f"{column.label}: {column.run.badge}" for column in comparison.columns]
    lined = [(c.label, c.document) for c in comparison.columns if c.document and c.document.timeline]
    notes = notes_section(comparison.notes)
    sections = [
        _cards(comparison),
        _settings(comparison),
        _table(comparison),
        difference_section([(c.label, c.document) for c in comparison.columns if c.document]),
        timelines_section(lined, opened),
        _changed_stacks(comparison.changed),
        el("div.columns", section("reproduce", "Reproduce", "", fact_list(comparison.reproduce)), notes),
    ]
    return render_page(comparison.title, subtitle, sections, data, "timeline" if drawn else None)


# ---- cards -----------------------------------------------------------------------------------------------------------


def _cards(comparison: ComparisonDocument) -> Markup:
    cards = [_card(comparison, i, total) for i, total in enumerate(comparison.totals)]
    return el(
        "section",
        {"id": "summary", "aria-label": "Summary"},
        *headline_lines(comparison.headline),
        *([el("p.cause", comparison.unchanged)] if comparison.unchanged else []),
        el("div.cards", *cards),
    )


def _card(comparison: ComparisonDocument, index: int, total: int | None) -> Markup:
    column = comparison.columns[index]
    document = column.document
    number, _, unit = ("–" if total is None else amount(total)).partition(" ")
    words: list[Child] = []
    if document:
        words.append(el("p", f"{document.summary.peak_word} in {document.summary.where}"))
        words.append(el("p.muted", document.headline.cause))
    else:
        words.append(el("p", "A sum of components, not a peak"))
    words += [el("p.muted fine", " · ".join(column.facts))]
    if document and document.report.oom:
        words.insert(0, el("p.bad", oom_sentence(document.report.oom)))
    if column.room:
        words += [el("p", f"How far from out of memory: {column.room.sentence}"), room_bar(column.room)]
    return el(
        "div.card",
        el("h2", column.label, " ", el(f"span.badge {column.run.badge}", column.run.badge)),
        el("div.number", el("strong.total-gib", number), " ", unit),
        _fits(comparison, index),
        _card_bar(comparison, column),
        *words,
    )


def _fits(comparison: ComparisonDocument, index: int) -> Markup | None:
    if not comparison.verdicts:
        return None
    fits, words = comparison.verdicts[index]
    return el("p.ok" if fits else "p.bad", f"Fits in {comparison.device}: {words}")


def _card_bar(comparison: ComparisonDocument, column: RunColumn) -> Markup:
    scale = comparison.rows.scale
    end = cap_mark(comparison.capacity_bytes, scale)
    return el("div.capped", bar(column.parts, scale), end)


# ---- settings --------------------------------------------------------------------------------------------------------


def _settings(comparison: ComparisonDocument) -> Markup | None:
    if not (comparison.settings or comparison.others):
        return None
    first, others = comparison.settings, comparison.others
    rest = None
    if others is not None:
        n = len(others.lines)
        words = "1 other setting differs" if n == 1 else f"{n} other settings and circumstances differ"
        words = words if first else f"{n} difference{'' if n == 1 else 's'}"
        rest = el("details.config", {"open": not first}, el("summary", words), draw_table(others))
    return section("changed", "What was set differently", "", draw_table(first), rest)


# ---- rows ------------------------------------------------------------------------------------------------------------


def _table(comparison: ComparisonDocument) -> Markup:
    note = "at each run's peak, on one scale; rows add up to the total, per-category peaks need not coincide"
    if any(c.document is None for c in comparison.columns):
        note += "; a published total is the sum of its components"
    return section("components", "Side by side", note, draw_table(comparison.rows), legend(comparison.legend))


# ---- what changed by stack -------------------------------------------------------------------------------------------


def _changed_stacks(entries: Sequence[ChangedStacks]) -> Markup | None:
    """Draw a table for each later run; of several only the first is open."""
    if not entries:
        return None
    note = "blocks alive at the peaks; those with equal stack and size in both runs are left out"
    first, *rest = entries
    more = [el("details.changed", el("summary", entry.title), _stacks_table(entry)) for entry in rest]
    return section("stacks", "What changed by stack", note, el("h3", first.title), _stacks_table(first), *more)


def _stacks_table(entry: ChangedStacks) -> Markup:
    return join(el("p.muted fine", entry.note), draw_table(entry.stacks))
