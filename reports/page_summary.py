"""The page's first screen: title, out-of-memory banner, summary, advice."""

from __future__ import annotations

from collections.abc import Sequence

from memprof.reports.markup import Markup, el
from memprof.reports.model import Fact, Oom, Part, Summary
from memprof.reports.page_parts import bar, stack_details, swatch
from memprof.reports.text import gib, percent

__all__ = ["oom_banner", "page_header", "summary"]


def page_header(title: str, subtitle: Sequence[str]) -> Markup:
    """Title, what was recorded, and the buttons."""
    buttons = (
        el("button", {"id": "theme", "type": "button", "class": "needs-js"}, "Theme: auto"),
        el("button", {"id": "download", "type": "button", "class": "needs-js"}, "Download JSON"),
        el("button", {"id": "print", "type": "button", "class": "needs-js"}, "Print"),
    )
    return el(
        "header",
        {"class": "top"},
        el(
            "div",
            {},
            el("h1", {}, title),
            el("p", {"class": "muted sub"}, " · ".join(subtitle)),
        ),
        el("div", {"class": "buttons"}, *buttons),
    )


def oom_banner(oom: Oom | None) -> Markup | None:
    """What was asked for when memory ran out."""
    if oom is None:
        return None
    return el(
        "div",
        {"class": "banner", "role": "alert", "id": "oom"},
        el("p", {}, el("strong", {}, oom.sentence)),
        stack_details(oom.stack, "Where it was asked for"),
    )


def summary(summary: Summary, badge: str, first: str = "") -> Markup:
    """The peak in large, the facts beside it, one bar of the device, and the first thing to change."""
    number, unit = gib(summary.peak_bytes), "GiB"
    share = percent(summary.peak_bytes, summary.capacity_bytes) if summary.capacity_bytes else ""
    lead = f"{share} of the device, in " if share else "in "
    return el(
        "section",
        {"id": "summary", "aria-label": "Summary"},
        el(
            "div",
            {"class": "headline"},
            el(
                "div",
                {"class": "peak"},
                el("div", {"class": "muted"}, summary.peak_word, " ", el("span", {"class": f"badge {badge}"}, badge)),
                el("div", {"class": "number"}, el("strong", {"id": "peak-gib"}, number), " ", unit),
                el("div", {}, lead, el("a", {"href": "#timeline"}, summary.where)),
            ),
            el("dl", {"class": "facts"}, *[_fact_card(fact) for fact in summary.facts]),
        ),
        el("p", {"class": "cause"}, summary.cause),
        bar((*summary.bar, *summary.rest), summary.scale_bytes, labels=True, described=_bar_words(summary)),
        _bar_axis(summary),
        el("ul", {"class": "legend"}, *[_legend(p) for p in (*summary.bar, *summary.rest)]),
        el("p", {"class": "first"}, first, " ", el("a", {"href": "#advice"}, "All changes")) if first else None,
    )


def _fact_card(fact: Fact) -> Markup:
    return el(
        "div",
        {},
        el("dt", {"class": "muted"}, fact.label),
        el("dd", {"class": "value"}, fact.value),
        el("dd", {"class": "muted note"}, fact.note),
    )


def _bar_words(summary: Summary) -> str:
    return "At the peak: " + ", ".join(f"{p.label} {gib(p.bytes)} GiB" for p in (*summary.bar, *summary.rest))


def _bar_axis(summary: Summary) -> Markup:
    allocated = sum(p.bytes for p in summary.bar)
    ends = gib(summary.capacity_bytes or summary.scale_bytes)
    used = summary.scale_bytes - sum(p.bytes for p in summary.rest if p.id == "free")
    words = f"{gib(allocated)} active" if summary.rest else ""
    if summary.rest and used != allocated:
        words += f" · {gib(used)} taken from the device"
    return el(
        "div", {"class": "bar-axis muted"}, el("span", {}, "0"), el("span", {}, words), el("span", {}, f"{ends} GiB")
    )


def _legend(part: Part) -> Markup:
    return el("li", {}, swatch(part.id), part.label, " ", el("span", {"class": "muted"}, gib(part.bytes)))
