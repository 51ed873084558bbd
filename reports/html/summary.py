"""The page's first screen: title, out-of-memory banner, summary, advice."""

from __future__ import annotations

from collections.abc import Sequence

from memprof.reports.document.model import (
    Advice,
    Advised,
    Combination,
    Fact,
    LengthRow,
    NeedRow,
    Oom,
    Part,
    Prediction,
    Summary,
)
from memprof.reports.document.text import gib, percent, signed_gib, thousands
from memprof.reports.html.elements import Markup, bar, column, el, section, stack_details, swatch

__all__ = [
    "advice_section",
    "oom_banner",
    "page_header",
    "prediction_section",
    "summary",
]

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


_SHOWN = 4


def advice_section(advised: Advised) -> Markup | None:
    """Changes, those that save most first; the set that fits before them, where one was asked for."""
    if not advised.changes and advised.combination is None:
        return None
    return section(
        "advice",
        "What would lower the peak",
        advised.basis,
        _combination(advised.combination),
        *_lists([_change(a, advised.changes) for a in advised.changes]),
    )


def _lists(items: Sequence[Markup]) -> list[Markup]:
    """The first ones open, the rest folded: the timeline is what people scroll to."""
    shown, rest = items[:_SHOWN], items[_SHOWN:]
    found = [el("ol", {"class": "advice"}, *shown)] if shown else []
    if rest:
        more = el("summary", {}, "One more that saves less" if len(rest) == 1 else f"{len(rest)} more that save less")
        found.append(el("details", {}, more, el("ol", {"class": "advice", "start": str(_SHOWN + 1)}, *rest)))
    return found


def _combination(found: Combination | None) -> Markup | None:
    if found is None:
        return None
    return el(
        "div",
        {"class": "together" if found.fits else "together not"},
        el("p", {}, el("strong", {}, found.sentence)),
        el("pre", {"tabindex": "0"}, "\n".join(found.settings)) if found.settings else None,
    )


def _change(change: Advice, all_changes: Sequence[Advice]) -> Markup:
    most = max(a.saves_bytes for a in all_changes) or 1
    width = f"width:{100 * change.saves_bytes / most:.2f}%"
    words = " ".join(w for w in (change.costs, change.limit, change.also) if w)
    badges = [
        el("span", {"class": f"badge {change.basis}"}, "estimate" if change.basis == "estimated" else change.basis),
        el("span", {"class": "badge exact"}, "same gradients") if change.exact else None,
    ]
    after = f"leaves {gib(change.after_bytes)}" if change.after_bytes is not None else ""
    return el(
        "li",
        {},
        el(
            "div",
            {"class": "saves"},
            el("strong", {}, f"{signed_gib(-change.saves_bytes)} GiB"),
            el(
                "div",
                {"class": "bar thin", "aria-hidden": "true"},
                el("span", {"class": "seg c-saved", "style": width}),
            ),
            el("span", {"class": "muted"}, after),
        ),
        el(
            "div",
            {"class": "change"},
            el("div", {}, el("strong", {}, change.action), " ", *badges),
            el("code", {}, change.setting) if change.setting else None,
            el("div", {"class": "muted"}, words),
        ),
    )


_WORDS = {True: ("ok", "fits"), False: ("bad", "does not fit"), None: ("muted", "–")}


def prediction_section(prediction: Prediction | None) -> Markup | None:
    """The verdict's sentence, the phases' table, the lengths' table, the expected error."""
    if prediction is None:
        return None
    title = {True: "It fits", False: "It does not fit", None: "How sure is this?"}[prediction.fits]
    return section(
        "prediction",
        title,
        "simulated; what decides is reserved memory plus what is outside torch" if prediction.verdict else "",
        el("p", {}, prediction.verdict) if prediction.verdict else None,
        _phases(prediction.needs) if prediction.needs else None,
        el("p", {}, prediction.lengths_sentence) if prediction.lengths_sentence else None,
        _lengths(prediction.lengths) if prediction.lengths else None,
        el("p", {"class": "muted"}, prediction.error) if prediction.error else None,
    )


def _table(head: Markup, rows: list[Markup]) -> Markup:
    table = el("table", {"class": "plain"}, el("thead", {}, head), el("tbody", {}, *rows))
    return el("div", {"class": "scroll"}, table)


def _verdict(fits: bool | None) -> Markup:
    mark, word = _WORDS[fits]
    return el("td", {}, el("span", {"class": mark}, word))


def _phases(needs: tuple[NeedRow, ...]) -> Markup:
    head = el("tr", {}, column("Phase"), column("Held, GiB", True), column("Needed, GiB", True), column("Alone"))
    rows = [
        el(
            "tr",
            {},
            el("th", {"scope": "row"}, need.label, el("b", {}, " decides") if need.decides else None),
            el("td", {"class": "num"}, gib(need.allocated_bytes)),
            el("td", {"class": "num"}, gib(need.needed_bytes)),
            _verdict(need.fits),
        )
        for need in needs
    ]
    return _table(head, rows)


def _lengths(lengths: tuple[LengthRow, ...]) -> Markup:
    numbers = ("Tokens", "Steps at most so long", "Held, GiB", "Needed, GiB")
    columns = [column("Longest completion of a batch"), *[column(name, True) for name in numbers]]
    head = el("tr", {}, *columns, column("Verdict"), column("Known"))
    rows = [
        el(
            "tr",
            {},
            el("th", {"scope": "row"}, row.label),
            el("td", {"class": "num"}, thousands(row.tokens)),
            el("td", {"class": "num"}, percent(round(1e6 * row.share_below), 1_000_000)),
            el("td", {"class": "num"}, gib(row.peak_bytes)),
            el("td", {"class": "num"}, gib(row.needed_bytes)),
            _verdict(row.fits),
            el("td", {"class": "muted"}, "executed" if row.executed else "between two executed"),
        )
        for row in lengths
    ]
    return _table(head, rows)
