"""Draw a plan's page: how memory grows along its rows against the card, a table, the settings to paste."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memprof.reports.document.model import Part
from memprof.reports.document.plan import PlanDocument, PlanRow
from memprof.reports.document.text import gib
from memprof.reports.html.elements import Markup, column, el, join, section, swatch
from memprof.reports.html.page import page_header, render_page
from memprof.reports.html.static_timeline import nice_step
from memprof.reports.palette import slug

from memprof.units import GIB

__all__ = ["render_plan"]

_WIDTH, _ROW, _LEFT, _RIGHT, _TOP = 940, 26, 210, 130, 22


def render_plan(plan: PlanDocument) -> str:
    """Render a plan's page as text."""
    room = f"{gib(plan.total_bytes)} GiB, of which {gib(plan.limit_bytes)} may be used"
    body = join(
        page_header(plan.title, ["simulated", room]),
        el("main", {"id": "main"}, _chart(plan), _table(plan.rows), _best(plan), _notes(plan.notes)),
    )
    return render_page(plan.title, body, {"report": plan.data}, charts=False)


def _chart(plan: PlanDocument) -> Markup:
    """Draw one stacked bar a row, and a line where the card ends."""
    scale = plan.scale_bytes * 1.03
    height = _TOP + _ROW * len(plan.rows) + 24

    def x(n_bytes: float) -> float:
        return round(_LEFT + n_bytes / scale * (_WIDTH - _LEFT - _RIGHT), 1)

    limit = x(plan.limit_bytes)
    drawn = [
        _grid(scale, height, x),
        *(_bar(row, _TOP + index * _ROW, x) for index, row in enumerate(plan.rows)),
        el("line", {"x1": limit, "x2": limit, "y1": _TOP - 6, "y2": height - 20, "class": "peak"}),
        el("text", {"x": limit, "y": _TOP - 9, "text-anchor": "middle", "class": "peak"}, "limit"),
    ]
    about = "Needed memory of each row: " + "; ".join(f"{row.method} {gib(row.needed_bytes)} GiB" for row in plan.rows)
    picture = el(
        "svg",
        {"viewBox": f"0 0 {_WIDTH} {height}", "role": "img", "aria-label": about, "class": "timeline-svg"},
        *drawn,
    )
    used: dict[str, Part] = {part.id: part for row in plan.rows for part in row.parts}
    entries = [el("li", {}, swatch(part.id), part.label) for part in used.values()]
    return section("growth", "What each needs", "GiB", picture, el("ul", {"class": "legend"}, *entries))


def _bar(row: PlanRow, top: int, x: Callable[[float], float]) -> Markup:
    below = 0
    drawn = [el("text", {"x": _LEFT - 8, "y": top + 16, "text-anchor": "end"}, row.method[:34])]
    for part in row.parts:
        colour = part.id if part.id == "cached" else slug(part.id)
        box = {"x": x(below), "y": top + 4, "width": max(x(below + part.bytes) - x(below), 0), "height": _ROW - 8}
        label = f"{part.label}: {gib(part.bytes)} GiB"
        drawn.append(el("g", {}, el("title", {}, label), el("rect", {**box, "class": f"fill c-{colour}"})))
        below += part.bytes
    words = f"{gib(row.needed_bytes)}{'' if row.fits else ', does not fit'}"
    return join(*drawn, el("text", {"x": x(below) + 6, "y": top + 16}, words))


def _grid(scale: float, height: int, x: Callable[[float], float]) -> Markup:
    step = nice_step(scale / GIB)
    lines = []
    for i in range(int(scale / GIB / step) + 1):
        at = x(i * step * GIB)
        lines.append(el("line", {"x1": at, "x2": at, "y1": _TOP, "y2": height - 20, "class": "grid"}))
        lines.append(el("text", {"x": at, "y": height - 6, "text-anchor": "middle"}, f"{i * step:g}"))
    return join(*lines)


def _table(rows: Sequence[PlanRow]) -> Markup:
    head = el(
        "tr", {}, column("Method"), column("Verdict"), column("Needed, GiB", True), column("Held, GiB", True),
        column("Host, GiB", True), column("Highest in"), column("Largest"),
    )  # fmt: skip
    body = [
        el(
            "tr",
            {},
            el("th", {"scope": "row"}, row.method),
            el("td", {}, el("span", {"class": "ok" if row.fits else "bad"}, row.verdict)),
            *[el("td", {"class": "num"}, gib(n)) for n in (row.needed_bytes, row.held_bytes, row.host_bytes)],
            el("td", {}, row.phase_label),
            el("td", {}, row.largest_label),
        )
        for row in rows
    ]
    table = el("table", {"class": "plain"}, el("thead", {}, head), el("tbody", {}, *body))
    return section("rows", "Side by side", "", el("div", {"class": "scroll", "tabindex": "0"}, table))


def _best(plan: PlanDocument) -> Markup | None:
    if not plan.best:
        return None
    return section("best", "Ready to paste", plan.best, el("pre", {"tabindex": "0"}, plan.code))


def _notes(notes: Sequence[str]) -> Markup | None:
    items = [el("li", {}, note) for note in notes]
    return section("notes", "Notes", "", el("ul", {"class": "notes"}, *items)) if items else None
