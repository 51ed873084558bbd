"""Render a report as GitHub Markdown, for issues and pull requests."""

from __future__ import annotations

from collections.abc import Sequence

from memprof.reports.document.model import GUESS, Document, Ranks, Row
from memprof.reports.document.text import gib, percent, thousands
from memprof.reports.markdown.advice import render_advised
from memprof.reports.markdown.elements import code, draw_table, headline, table, text

__all__ = ["render_markdown"]

_MOST_RANKS = 32


def render_markdown(document: Document) -> str:
    """Render title and peak, then rows, phases and the largest allocations as tables, and notes at the end."""
    blocks = [
        f"### {text(document.title)}",
        text(" · ".join(document.subtitle)),
        headline(document.headline),
        _oom(document),
        _peak(document),
        text(f"How far from out of memory: {document.room.sentence}") if document.room else "",
        _facts(document),
        _prediction(document),
        _rows(document.rows),
        _ranks(document.ranks),
        draw_table(document.recordings),
        draw_table(document.phase_table),
        _largest(document),
        render_advised(document.advice).rstrip(),
        _closing(document),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _oom(document: Document) -> str:
    return f"> {text(document.oom.sentence)}" if document.oom else ""


def _peak(document: Document) -> str:
    summary = document.summary
    if document.headline.verdict.startswith(summary.peak_word):
        return ""
    share = f", {percent(summary.peak_bytes, summary.capacity_bytes)} of the device" if summary.capacity_bytes else ""
    return f"{text(summary.peak_word)}: **{gib(summary.peak_bytes)} GiB** in {text(summary.where)}{share}."


def _facts(document: Document) -> str:
    summary = document.summary
    facts = (*summary.facts, summary.guessed) if summary.guessed else summary.facts
    return "\n".join(f"- {text(f.label)}: **{text(f.value)}** ({text(f.note)})" for f in facts)


def _prediction(document: Document) -> str:
    """Render the verdict of a simulated run, and its tables."""
    found = document.prediction
    if found is None:
        return ""
    blocks = [draw_table(found.needs), text(found.lengths_sentence), draw_table(found.lengths), text(found.error)]
    return "\n\n".join(block for block in blocks if block)


def _rows(rows: Sequence[Row]) -> str:
    total = rows[-1].at_peak
    lines = []
    for row in rows:
        bold = "**" if row.id == "total" else ""
        lines.append([f"{bold}{text(row.label)}{bold}", f"{bold}{text(gib(row.at_peak))}{bold}", *_shares(row, total)])
        lines += [[f"&nbsp;&nbsp;{text(c.marked)}", text(gib(c.at_peak)), *_shares(c, total)] for c in row.children]
    return table(["GiB", "At the peak", "of peak", "Own peak"], "lrrr", lines)


def _shares(row: Row, total: int) -> list[str]:
    return [text(percent(row.at_peak, total)), "–" if row.own_peak is None else text(gib(row.own_peak))]


def _ranks(ranks: Ranks | None) -> str:
    """Render the ranks by category, the fullest first; nothing where there is one process."""
    if ranks is None:
        return ""
    head = ["Rank", "Peak in", "GiB", *[text(label) for _, label in ranks.columns]]
    rows = [
        [f"{r.rank}{' **out of memory**' if r.oom else ''}", text(r.where), f"**{text(gib(r.peak_bytes))}**"]
        + [text(gib(c.bytes)) for c in r.cells]
        for r in ranks.rows[:_MOST_RANKS]
    ]
    words = [text(w) for w in (ranks.sentence, ranks.missing, *ranks.differences) if w]
    return "\n\n".join([" ".join(words), table(head, "llr" + "r" * len(ranks.columns), rows)])


def _largest(document: Document) -> str:
    rows = []
    for a in document.allocations[:10]:
        many = f" ×{thousands(a.count)}" if a.count > 1 else ""
        why = f"{a.why}{GUESS}" if a.guessed else a.why
        name = a.name or a.shape or a.detail or a.category_label
        rows.append(
            [code(name) + many, text(a.category_label), text(gib(a.bytes)), text(why), code(a.site) if a.site else ""]
        )
    return (
        table(["Largest alive at the peak", "Category", "GiB", "How it is known", "Made at"], "llrll", rows)
        if rows
        else ""
    )


def _closing(document: Document) -> str:
    known = ", ".join(f"{e.id} {100 * e.share:.1f} %" for e in document.evidence)
    wrong = [c for c in document.adds_up.checks if c.ok is False]
    sums = "; ".join(f"{c.label}: {c.value}, {c.note}" for c in wrong) if wrong else "yes, to the byte"
    lines = [f"How it is known: {text(known)}.", f"Does it add up? {text(sums)}."]
    lines += [f"- {text(note)}" for note in document.notes]
    return "\n".join(lines)
