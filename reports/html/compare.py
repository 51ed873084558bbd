"""Draw a comparison's page: who needs how much, what was set differently, row by row, and what only one run holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memprof.reports.document.comparison import Compared, ComparedRun, Comparison, OnlyIn, change_words
from memprof.reports.document.text import amount
from memprof.reports.html.charts import timelines_section
from memprof.reports.html.elements import (
    Child,
    Markup,
    bar,
    categories_of_row,
    colour_class,
    column,
    draw_table,
    el,
    fact_list,
    join,
    scrolling,
    section,
    swatch,
)
from memprof.reports.html.interactive_timeline import MAX_PACKED, timeline_data
from memprof.reports.html.opened import Opened, opened_data
from memprof.reports.html.page import page_header, render_page
from memprof.reports.html.summary import headline_lines, room_bar

from memprof.files import write_text
from memprof.units import GIB

__all__ = ["render_comparison", "write_comparison"]


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Write a comparison's page, complete or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    write_text(path, render_comparison(comparison))


def render_comparison(comparison: Comparison) -> str:
    """Render a comparison's page as text."""
    drawn = [c.document for c in comparison.columns if c.document and c.document.timeline]
    opened = [Opened(document, run) for run, document in enumerate(drawn)]
    data: dict[str, Any] = {"report": comparison.data}
    if drawn:
        most = MAX_PACKED // len(drawn)
        data["timelines"] = [
            timeline_data(d.timeline, d, most, o) for d, o in zip(drawn, opened, strict=True) if d.timeline
        ]
        data["opened"] = opened_data(opened)
    return render_page(comparison.title, _body(comparison, opened), data, "timeline" if drawn else None)


def _body(comparison: Comparison, opened: Sequence[Opened]) -> Markup:
    """Make everything above the page's footer."""
    subtitle = [f"{column.label}: {column.badge}" for column in comparison.columns]
    drawn = [(c.label, c.document) for c in comparison.columns if c.document and c.document.timeline]
    return join(
        page_header(comparison.title, subtitle),
        el(
            "main",
            {"id": "main"},
            _cards(comparison),
            _settings(comparison),
            _table(comparison),
            timelines_section(drawn, opened),
            _only_in(comparison.only_in),
            _bottom(comparison),
        ),
    )


# ---- cards -----------------------------------------------------------------------------------------------------------


def _cards(comparison: Comparison) -> Markup:
    totals = comparison.rows[-1].at_peak
    cards = [_card(comparison, i, totals[i]) for i in range(len(comparison.columns))]
    return el(
        "section",
        {"id": "summary", "aria-label": "Summary"},
        *headline_lines(comparison.headline),
        *([el("p", {"class": "cause"}, comparison.unchanged)] if comparison.unchanged else []),
        el("div", {"class": "cards"}, *cards),
    )


def _card(comparison: Comparison, index: int, total: int | None) -> Markup:
    column = comparison.columns[index]
    document = column.document
    number, _, unit = ("–" if total is None else amount(total)).partition(" ")
    words: list[Child] = []
    if document:
        words.append(el("p", {}, f"{document.summary.peak_word} in {document.summary.where}"))
        words.append(el("p", {"class": "muted"}, document.headline.cause))
    else:
        words.append(el("p", {}, "A sum of components, not a peak"))
    words += [el("p", {"class": "muted fine"}, " · ".join(column.facts))]
    if document and document.oom:
        words.insert(0, el("p", {"class": "bad"}, document.oom.sentence))
    if column.room:
        words += [el("p", {}, f"How far from out of memory: {column.room.sentence}"), room_bar(column.room)]
    return el(
        "div",
        {"class": "card"},
        el("h2", {}, column.label, " ", _badge(column)),
        el("div", {"class": "number"}, el("strong", {"class": "total-gib"}, number), " ", unit),
        _fits(comparison, index),
        _card_bar(comparison, column),
        *words,
    )


def _badge(column: ComparedRun) -> Markup:
    return el("span", {"class": f"badge {column.badge}"}, column.badge)


def _fits(comparison: Comparison, index: int) -> Markup | None:
    if not comparison.verdicts:
        return None
    verdict = comparison.verdicts[index]
    words = f"Fits in {_device(comparison)}: {verdict.words}"
    return el("p", {"class": "ok" if verdict.fits else "bad"}, words)


def _card_bar(comparison: Comparison, column: ComparedRun) -> Markup:
    described = ", ".join(f"{p.label} {amount(p.bytes)}" for p in column.parts)
    scale = _scale(comparison)
    return el("div", {"class": "capped"}, bar(column.parts, scale, described=described), _cap(comparison, scale))


def _scale(comparison: Comparison) -> int:
    """Count the bytes of a full bar, the capacity among them unless everything would look tiny beside it."""
    capacity = comparison.capacity_bytes or 0
    return max(comparison.scale_bytes, capacity if capacity <= 4 * comparison.scale_bytes else 0)


def _cap(comparison: Comparison, scale: int) -> Markup | None:
    capacity = comparison.capacity_bytes
    if not capacity or capacity > scale:
        return None
    style = f"left:{100 * capacity / scale:.3f}%"
    return el("i", {"class": "cap", "style": style, "title": f"{amount(capacity)}, the device", "aria-hidden": "true"})


# ---- settings --------------------------------------------------------------------------------------------------------


def _settings(comparison: Comparison) -> Markup | None:
    if not (comparison.settings or comparison.others):
        return None
    first, others = comparison.settings, comparison.others
    rest = None
    if others is not None:
        n = len(others.lines)
        words = "1 other setting differs" if n == 1 else f"{n} other settings and circumstances differ"
        words = words if first else f"{n} difference{'' if n == 1 else 's'}"
        rest = el("details", {"class": "config", "open": not first}, el("summary", {}, words), draw_table(others))
    return section("changed", "What was set differently", "", draw_table(first), rest)


# ---- rows ------------------------------------------------------------------------------------------------------------


def _table(comparison: Comparison) -> Markup:
    body: list[Child] = []
    for row in comparison.rows:
        body += _rows(comparison, row, 0, "")
    body += [_row(comparison, line, 0, "", beside=True) for line in comparison.beside]
    if comparison.verdicts:
        body.append(_fits_row(comparison))
    note = "at each run's own peak, on one scale; rows add up to the total, own peaks need not coincide"
    if any(c.document is None for c in comparison.columns):
        note += "; a published total is the sum of its components"
    table = el(
        "table",
        {"class": "components compared"},
        el("thead", {}, _head(comparison)),
        el("tbody", {}, *body),
    )
    return section("components", "Side by side", note, scrolling(table), _legend(comparison))


def _head(comparison: Comparison) -> Markup:
    cells: list[Child] = [column("Component")]
    for run in comparison.columns:
        # A share in a calculation counts for nothing in a table's columns, so it is written out: bars must compare.
        width = f"width:{40 / len(comparison.columns):.2f}%"
        cells.append(el("th", {"scope": "col", "class": "figure", "style": width}, run.label, " ", _badge(run)))
        cells += [column("own peak", True, "wide")] if run.document else []
    if len(comparison.columns) == 2:
        cells += [column("Difference", True, "difference"), column("Ratio", True, "wide"), column("Change")]
    return el("tr", {}, *cells)


def _rows(comparison: Comparison, line: Compared, level: int, parent: str) -> list[Markup]:
    found = [_row(comparison, line, level, parent)]
    path = f"{parent}/{line.id}" if parent else line.id
    for child in line.children:
        found += _rows(comparison, child, level + 1, path)
    return found


def _row(comparison: Comparison, line: Compared, level: int, parent: str, *, beside: bool = False) -> Markup:
    colour = parent.rpartition("/")[2] if level == 2 else line.id
    cells: list[Child] = []
    for i, (figure, own) in enumerate(zip(line.at_peak, line.own_peak, strict=True)):
        cells.append(_figure(comparison, line, i, figure, level, colour))
        if comparison.columns[i].document:
            cells.append(el("td", {"class": "num wide muted"}, "" if own is None else amount(own)))
    if len(comparison.columns) == 2:
        cells.append(el("td", {"class": "num difference"}, _difference(line, 1)))
        cells.append(el("td", {"class": "num wide"}, line.ratios[0]))
        cells.append(el("td", {"class": "change"}, _change(line, 1)))
    empty = not any(line.at_peak) and not any(line.own_peak)
    kind = "total" if line.id == "total" else "beside" if beside else "zero" if empty else ""
    path = f"{parent}/{line.id}" if parent else line.id
    return el(
        "tr",
        {
            "class": f"level{level} {kind}".strip(),
            "data-path": path,
            "data-parent": parent or None,
            **categories_of_row(level, line.id, colour, [child.id for child in line.children]),
        },
        el("th", {"scope": "row", "title": line.words or None}, swatch(colour) if level == 1 else None, line.label),
        *cells,
    )


def _figure(comparison: Comparison, line: Compared, index: int, figure: int | None, level: int, colour: str) -> Markup:
    """Draw a figure and its bar: a group's is made of its categories, the total's and the device's are plain."""
    scale = _scale(comparison)
    parts: list[tuple[str, int]] = [(colour, figure or 0)]
    if level == 0 and any(child.at_peak[index] for child in line.children):
        parts = [(child.id, child.at_peak[index] or 0) for child in line.children]
    elif level == 0 and figure and comparison.columns[index].document is None:
        parts = [(part.id, part.bytes) for part in comparison.columns[index].parts if part.label == line.label]
    plain = line.id in ("total", "device_peak", "reserved", "non_torch") or line.id.startswith("phase:")
    host = line.id.endswith("_bytes")
    segments = [
        el(
            "span",
            {"class": f"seg c-{'total' if plain else colour_class(c)}", "style": f"width:{100 * n / scale:.4f}%"},
        )
        for c, n in ([(colour, figure or 0)] if plain else [] if host else parts)
        if n
    ]
    cap = _cap(comparison, scale) if line.id in ("total", "device_peak") and figure is not None else None
    return el(
        "td",
        {"class": "figure"},
        el("span", {"class": "num"}, "–" if figure is None else amount(figure)),
        el("div", {"class": "bar thin capped"}, *segments, cap),
        _change_below(comparison, line, index),
    )


def _change_below(comparison: Comparison, line: Compared, index: int) -> Markup | None:
    """Say below the figure how a later run differs, among three runs or more: there is no room for columns."""
    if len(comparison.columns) == 2 or not index or line.changes[index - 1] in ("–", "same"):
        return None
    return el("small", {}, f"{_difference(line, index)}, {_change(line, index)}")


def _difference(line: Compared, index: int) -> str:
    """Write how much more a later run holds than the first, with its unit; ``–`` where one is not known."""
    first, other = line.at_peak[0], line.at_peak[index]
    if first is None or other is None:
        return "–"
    return f"+{amount(other - first)}" if other > first else amount(other - first)


def _change(line: Compared, index: int) -> str:
    """Put in words how a later run differs from the first, sizes with their unit."""
    return change_words(line.at_peak[0], line.at_peak[index], line.own_peak[0], line.own_peak[index], amount)


def _fits_row(comparison: Comparison) -> Markup:
    cells: list[Child] = []
    for run, verdict in zip(comparison.columns, comparison.verdicts, strict=True):
        cells.append(el("td", {"class": "ok" if verdict.fits else "bad"}, verdict.words))
        cells += [el("td", {"class": "wide"})] if run.document else []
    if len(comparison.columns) == 2:
        cells += [el("td", {"class": "difference"}), el("td", {"class": "wide"}), el("td")]
    drawn = " (dashed line)" if (comparison.capacity_bytes or 0) <= _scale(comparison) else ""
    return el("tr", {"class": "fits"}, el("th", {"scope": "row"}, f"Fits in {_device(comparison)}{drawn}"), *cells)


def _device(comparison: Comparison) -> str:
    """Write the capacity as it was given: 24 GB are not 24 GiB."""
    capacity = comparison.capacity_bytes or 0
    return f"{capacity / 1e9:g} GB" if capacity % 10**8 == 0 else f"{capacity / GIB:.2f} GiB"


def _legend(comparison: Comparison) -> Markup:
    return el(
        "ul",
        {"class": "legend"},
        *[el("li", {"data-category": colour_class(p.id)}, swatch(p.id), p.label) for p in comparison.legend],
    )


# ---- what only one holds ---------------------------------------------------------------------------------------------


def _only_in(entries: Sequence[OnlyIn]) -> Markup | None:
    if not entries:
        return None
    return section(
        "only-in",
        "Held by one and not by the other",
        "blocks alive at the peak, by stack and size, counted",
        el(
            "div",
            {"class": "columns even"},
            *[_only_in_part(entry, i, len(entries)) for i, entry in enumerate(entries)],
        ),
    )


def _only_in_part(entry: OnlyIn, index: int, n_entries: int) -> Markup:
    """Draw one direction of one pair; of several pairs only the first is open."""
    if n_entries <= 2:
        return el("div", {}, el("h3", {}, entry.title), _only_in_table(entry))
    return el(
        "details",
        {"class": "only-in", "open": index < 2},
        el("summary", {}, entry.title),
        _only_in_table(entry),
    )


def _only_in_table(entry: OnlyIn) -> Markup:
    return join(el("p", {"class": "muted fine"}, entry.note), draw_table(entry.allocations.part(0, 12)))


# ---- the rest --------------------------------------------------------------------------------------------------------


def _bottom(comparison: Comparison) -> Markup:
    notes = None
    if comparison.notes:
        items = [el("li", {}, note) for note in comparison.notes]
        notes = section("notes", "Notes", "", el("ul", {"class": "notes"}, *items))
    return el("div", {"class": "columns"}, _reproduce(comparison), notes)


def _reproduce(comparison: Comparison) -> Markup:
    return section("reproduce", "Reproduce", "", fact_list(comparison.reproduce))
