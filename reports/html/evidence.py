"""Draw the page's last part: does it add up, how it is known, what could not be known, how to reproduce."""

from __future__ import annotations

from collections.abc import Sequence

from memprof.reports.document.blocks import Column, Fact, TableRow, TextCell, table
from memprof.reports.document.build import host_facts, reproduce_facts
from memprof.reports.document.model import Check, Document
from memprof.reports.document.outside_torch import outside_facts, switches_table
from memprof.reports.document.tables import evidence_bytes
from memprof.reports.document.text import EVIDENCE_WORDS
from memprof.reports.html.elements import Markup, draw_table, el, fact_list, join, notes_section, section

from memprof.report.peaks import Peak
from memprof.report.run import Source

_NUMBER = Column("", right=True)


def bottom(document: Document) -> Markup:
    """Draw checks and evidence, notes, how to reproduce, host memory."""
    report = document.report
    outside = _facts("outside", "On the device outside torch", outside_facts(report.outside))
    host = _facts("host", "Host memory", host_facts(report.host))
    known = join(_evidence(report.peak), notes_section(document.notes, "What could not be known"))
    note = "a sleeping engine gives back pages that torch still counts"
    switches = draw_table(switches_table(report.switches))
    return join(
        section("switches", "Between rollout and training", note, switches) if switches else None,
        el("div.columns", _adds_up(document.checks), known),
        el("div.columns", _reproduce(report.source), join(outside, host)),
    )


_MARKS: dict[bool | None, TextCell | str] = {True: TextCell("✓", "ok"), False: TextCell("✗ differs:", "bad"), None: ""}


def _adds_up(checks: Sequence[Check]) -> Markup:
    lines = [TableRow((c.label, c.value, _MARKS[c.ok], TextCell(c.note, "muted"))) for c in checks]
    verdict = "no: see below" if any(check.ok is False for check in checks) else "yes, to the byte"
    return section("adds-up", "Does it add up?", verdict, draw_table(table(("", _NUMBER, "", ""), lines)))


def _evidence(peak: Peak) -> Markup:
    whole, lines = peak.active_bytes or 1, []
    for kind, n in evidence_bytes(peak):
        words = TextCell(EVIDENCE_WORDS[kind], "muted")
        lines.append(TableRow((TextCell(kind, f"evidence e-{kind}"), n, f"{100 * n / whole:.1f}%", words)))
    note = "bytes by kind of evidence"
    return section("evidence", "How it is known", note, draw_table(table(("", _NUMBER, _NUMBER, ""), lines)))


def _reproduce(source: Source) -> Markup:
    known = {str(key): str(value) for key, value in (source.config or {}).items() if value is not None}
    config = None
    if known:
        lines = [TableRow((key, TextCell(known[key], "code"))) for key in sorted(known)]
        summary = el("summary", f"Configuration, {len(lines)} settings")
        config = el("details.config", summary, draw_table(table(("", ""), lines)))
    return section("reproduce", "Reproduce", "", fact_list(reproduce_facts(source)), config)


def _facts(identifier: str, title: str, facts: Sequence[Fact]) -> Markup | None:
    return section(identifier, title, "", fact_list(facts)) if facts else None
