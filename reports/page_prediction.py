"""The page's section of a simulated run: does it fit, phase by phase and length by length."""

from __future__ import annotations

from memprof.reports.markup import Markup, el
from memprof.reports.model import LengthRow, NeedRow, Prediction
from memprof.reports.page_parts import column, section
from memprof.reports.text import gib, percent, thousands

__all__ = ["prediction_section"]

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
