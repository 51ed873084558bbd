"""Draw a plan's page: how memory grows along its rows against the card, a table, the settings to paste."""

from __future__ import annotations

from memprof.reports.document.plan import PlanDocument, parts_of, verdict_of
from memprof.reports.document.text import thousands
from memprof.reports.figures import front_json
from memprof.reports.html.elements import Markup, bar, copyable, draw_table, el, legend, notes_section, section
from memprof.reports.html.page import PageData, render_page
from memprof.reports.html.summary import headline_lines

from memprof.report.plan import PlanRow
from memprof.units import amount


def render_plan(plan: PlanDocument) -> str:
    """Render a plan's page as text."""
    found = plan.plan
    room = f"{amount(found.total_bytes)}, of which {amount(found.limit_bytes)} may be used"
    searched = _SEARCHED[found.maximized] if plan.largest_title else ""
    rows = section("rows", "Side by side", searched, draw_table(plan.table))
    sections = (_verdict(plan), _best(plan), _chart(plan), _prices(plan), rows, notes_section(plan.notes))
    subtitle = ("simulated, nothing was run on a GPU", room)
    front = front_json(plan) if plan.timed else None
    data = PageData(report=found, front=front)
    return render_page(plan.title, subtitle, sections, data, "pareto_front" if plan.timed else None)


def _verdict(plan: PlanDocument) -> Markup:
    """Give the answer before anything to paste."""
    lines = headline_lines(plan.headline, changes=False)
    badge = el("span.badge simulated", "simulated")
    return el("section", {"id": "summary", "aria-label": "Summary"}, *lines, el("p", badge))


def _best(plan: PlanDocument) -> Markup:
    """Show the settings to choose."""
    found = plan.plan
    code = copyable(code=found.code) if plan.best and found.code else None
    title = "Ready to paste" if code else "Nothing fits"
    fastest = el("p.cause", {"id": "fastest"}, plan.fastest_sentence)
    more = copyable(code=plan.fastest_code) if plan.fastest_code else None
    return section("best", title, "", code, fastest, more)


def _chart(plan: PlanDocument) -> Markup:
    """Draw one bar a row, all on one scale, with the card's limit and how far off each may be."""
    found = plan.plan
    scale = round(max(plan.scale_bytes, *(r.device_peak_bytes * plan.error_band[1] for r in found.rows)) * 1.01)
    rows = [_bar(plan, row, scale) for row in found.rows]
    used = {part.id: part for row in found.rows for part in parts_of(row)}
    return section(
        "growth",
        "What each needs",
        "reserved memory plus what is outside torch, as given, before anything is made larger; the black whiskers span "
        "what runs on real GPUs measured where such a need was simulated",
        el("div.growth", _limit_label(plan, scale), *rows),
        legend(used.values()),
        el("p.muted fine", found.expected_error.sentence),
    )


def _prices(plan: PlanDocument) -> Markup | None:
    """Hold the chart that the page's script draws; nothing where no time is estimated."""
    if not plan.timed:
        return None
    label = "Memory against time, a point for each row; the table below has the same figures."
    keys = el(
        "p.muted fine",
        "Filled and joined: the front, no other row both is faster and needs less memory. Grey: does not "
        "fit. Point at a row for its settings. Times are estimated from the GPU's published speed.",
    )
    chart = el("div", {"id": "front-chart", "class": "needs-js", "role": "img", "aria-label": label})
    smaller = ", and in smaller micro-batches if that does not fit" if plan.plan.maximized == "speed" else ""
    note = f"as given{smaller}; every row's step does the same work"
    if plan.per_tokens:
        note = f"the rows' steps differ in their work, so time is that of {thousands(1000)} tokens"
    return section("front", "Memory against time", note, chart, keys)


def _limit_label(plan: PlanDocument, scale: int) -> Markup:
    """Write above the line where the card ends, on the side that has room for it."""
    share = 100 * plan.plan.limit_bytes / scale
    side = f"right:{100 - share:.2f}%" if share > 50 else f"left:{share:.2f}%"
    words = f"limit {amount(plan.plan.limit_bytes)}"
    label = el("span", {"class": "limit " + ("before" if share > 50 else "after"), "style": side}, words)
    return el("div.grown head", {"aria-hidden": "true"}, el("span"), el("div.track", label), el("span"))


def _bar(plan: PlanDocument, row: PlanRow, scale: int) -> Markup:
    needed, verdict = row.device_peak_bytes, verdict_of(row)
    low, high = (100 * needed * factor / scale for factor in plan.error_band)
    return el(
        "div.grown",
        el("span.name", row.method),
        el(
            "div.track",
            bar(parts_of(row), scale, described=f"{row.method}, {verdict}: "),
            el("i.cap", {"style": f"left:{100 * plan.plan.limit_bytes / scale:.2f}%", "aria-hidden": "true"}),
            el("i.whisker", {"style": f"left:{low:.2f}%;width:{high - low:.2f}%", "aria-hidden": "true"}),
        ),
        el("span.num", amount(needed), " ", el("span", {"class": "ok" if row.fits else "bad"}, verdict)),
    )


_SEARCHED = {
    "context": "the largest run was simulated too; if a method does not fit as given, with smaller micro-batches",
    "num_generations": "what is largest was simulated too, with as many completions in a micro-batch",
    "batch": "what is largest was simulated too",
    "speed": "if a method does not fit as given, smaller micro-batches were simulated too",
}
