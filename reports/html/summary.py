"""Draw the page's first screen: the out-of-memory banner, the peak, and whether a simulated run fits."""

from __future__ import annotations

from memprof.reports.document.blocks import BarPart, Fact, HeadlineBlock
from memprof.reports.document.build import oom_sentence
from memprof.reports.document.model import PublishedRow, Room, Summary
from memprof.reports.document.prediction import lengths_table, needs_table
from memprof.reports.document.tables import shown_stack
from memprof.reports.html.elements import (
    Markup,
    bar,
    colour_class,
    draw_table,
    el,
    legend,
    section,
    stack_details,
    swatch,
)

from memprof.report import Report
from memprof.report.run import OutOfMemory
from memprof.units import amount, percent


def oom_banner(oom: OutOfMemory | None) -> Markup | None:
    """Say what was asked for when memory ran out."""
    if oom is None:
        return None
    return el(
        "div.banner",
        {"role": "alert", "id": "oom"},
        el("p", el("strong", oom_sentence(oom))),
        stack_details(shown_stack(oom.stack), "Requested at"),
    )


def summary(summary: Summary, badge: str, headline: HeadlineBlock, rows: tuple[PublishedRow, ...] = ()) -> Markup:
    """Draw the headline, the peak in large, the facts beside it, and one bar of the device.

    The legend ends with the categories of ``rows`` that the run had, though not at its peak.
    """
    shown = {part.id for part in summary.bar}
    others = [BarPart(child.id, child.label, 0) for row in rows for child in row.children if child.id not in shown]
    guessed = [_fact_card(summary.guessed, guessed=True)] if summary.guessed else []
    cards = [*(_fact_card(fact) for fact in summary.facts), *guessed]
    number, _, unit = amount(summary.peak_bytes).partition(" ")
    share = percent(summary.peak_bytes, summary.capacity_bytes) if summary.capacity_bytes else ""
    lead = f"{share} of the device, in " if share else "in "
    return el(
        "section",
        {"id": "summary", "aria-label": "Summary"},
        *headline_lines(headline),
        el(
            "div.headline",
            el(
                "div.peak",
                el("div.muted", summary.peak_word, " ", el(f"span.badge {badge}", badge)),
                el("div.number", el("strong", {"id": "peak-gib"}, number), " ", unit),
                el("div", lead, el("a", {"href": "#timeline"}, summary.where)) if summary.moment == "peak" else None,
            ),
            el("dl.facts", *cards),
        ),
        bar((*summary.bar, *summary.rest), summary.scale_bytes, labels=True, described=f"At the {summary.moment}: "),
        _bar_axis(summary),
        el("ul.legend", *[_legend(p) for p in (*summary.bar, *others, *summary.rest)]),
    )


def headline_lines(headline: HeadlineBlock, changes: bool = True) -> list[Markup]:
    """Draw the answer: verdict and cause, then what to change, then what was assumed."""
    lines = [el("p", {"class": "verdict bad" if headline.bad else "verdict"}, headline.verdict)]
    if headline.cause:
        lines.append(el("p.cause", headline.cause))
    if headline.action:
        more = (" ", el("a", {"href": "#advice"}, "All changes")) if changes else ()
        lines.append(el("p.first", headline.action, *more))
    return [*lines, el("p.muted", headline.assumed)] if headline.assumed else lines


def _fact_card(fact: Fact, guessed: bool = False) -> Markup:
    """Draw a fact; where it counts what is guessed, its note lists these allocations with what else each could be."""
    link = el("a", {"href": "#allocations", "data-filter": "inferred"}, fact.note) if guessed else fact.note
    mark = el("i.swatch guess", {"aria-hidden": "true"}) if guessed else None
    return el(
        "div",
        el("dt.muted", mark, fact.label),
        el("dd.value", fact.value if fact.bytes is None else amount(fact.bytes)),
        el("dd.muted note", link),
    )


def _bar_axis(summary: Summary) -> Markup:
    allocated = sum(p.bytes for p in summary.bar)
    ends = amount(summary.capacity_bytes or summary.scale_bytes)
    used = summary.scale_bytes - sum(p.bytes for p in summary.rest if p.id == "free")
    words = f"{amount(allocated)} active" if summary.rest else ""
    if summary.rest and used != allocated:
        words += f" · {amount(used)} taken from the device"
    return el("div.bar-axis muted", el("span", "0"), el("span", words), el("span", ends))


def _legend(part: BarPart) -> Markup:
    words = el("span.muted", amount(part.bytes) if part.bytes else "not at the peak")
    return el("li", {"data-category": colour_class(part.id)}, swatch(part.id), part.marked, " ", words)


def room_section(room: Room | None) -> Markup | None:
    """Draw how far the run was from out of memory: one bar, with a mark where the card ends."""
    if room is None:
        return None
    title, words = "How far from out of memory", el("p", room.sentence)
    return section("room", title, "", words, room_bar(room), legend(room.parts, figures=True))


def room_bar(room: Room) -> Markup:
    """Draw the bar alone."""
    end = None
    if room.capacity_bytes:
        left = f"left:{100 * room.capacity_bytes / room.scale_bytes:.4f}%"
        end = el("span.card-end", {"style": left, "title": f"GPU: {amount(room.capacity_bytes)}"})
    return el("div.room", bar(room.parts, room.scale_bytes), end)


def prediction_section(report: Report) -> Markup | None:
    """Draw the verdict's sentence, the phases' table, the lengths' table, the expected error."""
    fit, lengths, error = report.fit, report.lengths, report.expected_error
    if not (fit or lengths or error):
        return None
    title = {True: "It fits", False: "It does not fit", None: "How sure is this?"}[fit.fits if fit else None]
    return section(
        "prediction",
        title,
        "simulated; reserved memory plus memory outside torch decides" if fit else "",
        el("p", fit.sentence) if fit else None,
        draw_table(needs_table(fit)),
        el("p", lengths.sentence) if lengths else None,
        draw_table(lengths_table(lengths.points)) if lengths else None,
        el("p.muted", error.sentence) if error else None,
    )
