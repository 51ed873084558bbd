"""Draw the page's last part: does it add up, how it is known, what could not be known, how to reproduce."""

from __future__ import annotations

from collections.abc import Sequence

from memprof.reports.document.blocks import Fact, Line, Words, table
from memprof.reports.document.model import AddsUp, Document, EvidenceShare
from memprof.reports.html.elements import Markup, draw_table, el, fact_list, join, notes_section, section


def bottom(document: Document) -> Markup:
    """Draw checks and evidence, notes, how to reproduce, host memory."""
    outside = _facts("outside", "On the device outside torch", document.outside)
    host = _facts("host", "Host memory", document.host)
    known = join(_evidence(document.evidence), notes_section(document.notes, "What could not be known"))
    note, switches = "a sleeping engine gives back pages that torch still counts", draw_table(document.switches)
    return join(
        section("switches", "Between rollout and training", note, switches) if switches else None,
        el("div.columns", _adds_up(document.adds_up), known),
        el("div.columns", _reproduce(document), join(outside, host)),
    )


_MARKS: dict[bool | None, Words | str] = {True: Words("✓", "ok"), False: Words("✗ differs:", "bad"), None: ""}


def _adds_up(sums: AddsUp) -> Markup:
    lines = [Line((c.label, c.value, _MARKS[c.ok], Words(c.note, "muted"))) for c in sums.checks]
    verdict = "yes, to the byte" if sums.ok else "no: see below"
    return section("adds-up", "Does it add up?", verdict, draw_table(table("|>||", lines)))


def _evidence(shares: Sequence[EvidenceShare]) -> Markup:
    lines = [
        Line((Words(s.id, f"evidence e-{s.id}"), s.bytes, f"{100 * s.share:.1f} %", Words(s.words, "muted")))
        for s in shares
    ]
    note = "bytes at the peak by kind of evidence"
    return section("evidence", "How it is known", note, draw_table(table("|>|>|", lines)))


def _reproduce(document: Document) -> Markup:
    config = None
    if document.config:
        lines = [Line((key, Words(value, "code"))) for key, value in document.config]
        summary = el("summary", f"Configuration, {len(lines)} settings")
        config = el("details.config", summary, draw_table(table("|", lines)))
    return section("reproduce", "Reproduce", "", fact_list(document.reproduce), config)


def _facts(identifier: str, title: str, facts: Sequence[Fact]) -> Markup | None:
    return section(identifier, title, "", fact_list(facts)) if facts else None
