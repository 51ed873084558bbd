"""Draw the page's last part: does it add up, how it is known, what could not be known, how to reproduce."""

from __future__ import annotations

from collections.abc import Sequence

from memprof.reports.document.model import AddsUp, Document, EvidenceShare, Fact, SwitchRow
from memprof.reports.document.text import amount
from memprof.reports.html.elements import Markup, column, el, fact_list, join, scrolling, section
from memprof.reports.palette import slug

__all__ = ["bottom"]


def bottom(document: Document) -> Markup:
    """Draw checks and evidence, notes, how to reproduce, host memory."""
    return join(
        _switches(document.switches),
        el(
            "div",
            {"class": "columns"},
            _adds_up(document.adds_up),
            join(_evidence(document.evidence), _notes(document.notes)),
        ),
        el("div", {"class": "columns"}, _reproduce(document), join(_outside(document.outside), _host(document.host))),
    )


def _adds_up(sums: AddsUp) -> Markup:
    marks = {True: ("ok", "✓"), False: ("bad", "✗ differs:"), None: ("muted", "")}
    rows = [
        el(
            "tr",
            {},
            el("th", {"scope": "row"}, c.label),
            el("td", {"class": "num"}, c.value),
            el(
                "td",
                {},
                el("span", {"class": marks[c.ok][0]}, marks[c.ok][1]),
                " ",
                el("span", {"class": "muted"}, c.note),
            ),
        )
        for c in sums.checks
    ]
    verdict = "yes, to the byte" if sums.ok else "no: see below"
    return section(
        "adds-up",
        "Does it add up?",
        verdict,
        scrolling(el("table", {"class": "plain"}, el("tbody", {}, *rows))),
    )


def _evidence(shares: Sequence[EvidenceShare]) -> Markup:
    rows = [
        el(
            "tr",
            {},
            el("th", {"scope": "row"}, el("span", {"class": f"evidence e-{s.id}"}, s.id)),
            el("td", {"class": "num"}, amount(s.bytes)),
            el("td", {"class": "num"}, f"{100 * s.share:.1f} %"),
            el("td", {"class": "muted"}, s.words),
        )
        for s in shares
    ]
    return section(
        "evidence",
        "How it is known",
        "bytes at the peak by kind of evidence",
        scrolling(el("table", {"class": "plain"}, el("tbody", {}, *rows))),
    )


def _notes(notes: Sequence[str]) -> Markup | None:
    if not notes:
        return None
    return section(
        "notes", "What could not be known", "", el("ul", {"class": "notes"}, *[el("li", {}, note) for note in notes])
    )


def _reproduce(document: Document) -> Markup:
    config = None
    if document.config:
        rows = [
            el("tr", {}, el("th", {"scope": "row"}, k), el("td", {}, el("code", {}, v))) for k, v in document.config
        ]
        summary = el("summary", {}, f"Configuration, {len(rows)} settings")
        config = el(
            "details",
            {"class": "config"},
            summary,
            scrolling(el("table", {"class": "plain"}, el("tbody", {}, *rows))),
        )
    return section("reproduce", "Reproduce", "", fact_list(document.reproduce), config)


def _switches(rows: Sequence[SwitchRow]) -> Markup | None:
    """List what torch counts and what is resident after each switch between rollout and training."""
    if not rows:
        return None
    names = [("After", False), ("Step", True), ("torch counts", True), ("Given back", True), ("Resident", True)]
    head = [column(name, numeric) for name, numeric in [*names, ("Device, all processes", True)]]
    body = [
        el(
            "tr",
            {},
            el("th", {"scope": "row"}, el("i", {"class": f"swatch p-{slug(r.phase)}", "aria-hidden": "true"}), r.label),
            el("td", {"class": "num"}, "–" if r.step is None else str(r.step)),
            *[
                el("td", {"class": "num"}, "–" if n is None else amount(n))
                for n in (r.counted_bytes, r.unmapped_bytes, r.resident_bytes, r.device_used_bytes)
            ],
        )
        for r in rows
    ]
    table = el("table", {"class": "switches"}, el("thead", {}, el("tr", {}, *head)), el("tbody", {}, *body))
    note = "a sleeping engine gives back pages that torch still counts"
    return section("switches", "Between rollout and training", note, scrolling(table))


def _outside(facts: Sequence[Fact]) -> Markup | None:
    return section("outside", "On the device outside torch", "", fact_list(facts)) if facts else None


def _host(host: Sequence[Fact]) -> Markup | None:
    return section("host", "Host memory", "", fact_list(host)) if host else None
