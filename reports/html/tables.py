"""Draw the page's tables: components, steps, allocations, phases, what grew the device peak."""

from __future__ import annotations

from collections.abc import Sequence

from memprof.reports.document.blocks import Column, TableBlock, TableRow, TextCell, table
from memprof.reports.document.build import growth_words, has_trend, steps_table
from memprof.reports.document.model import AllocationRow, Document, PublishedRow
from memprof.reports.document.tables import call_site, component_table, shown_stack, site_words, unused_words
from memprof.reports.document.text import category_label, phase_label, size, thousands, where_words
from memprof.reports.html.elements import (
    Child,
    Markup,
    breakable,
    colour_class,
    column,
    draw_table,
    el,
    folded_stack,
    scrolling,
    section,
    swatch,
    what,
)
from memprof.reports.html.opened import Opened, particulars

from memprof.report.run import LeftBehind, StepGrowth
from memprof.units import amount, percent


def component_section(rows: Sequence[PublishedRow], moment: str) -> Markup:
    """Draw the published table's rows, down to categories and details."""
    note = f"values at the {moment} add up"
    if moment == "peak":
        note += "; \"highest\" is each row's highest value at any time, so these don't add up"
    unused = unused_words(rows)
    left_out = el("p.muted fine", unused) if unused else None
    drawn = draw_table(component_table(rows, moment))
    return section("components", f"What the {moment} is made of", note, drawn, left_out)


_LEFT_BEHIND = (
    "Left behind in several steps", "Category", Column("Steps", right=True), Column("Total", right=True, sums=True),
    Column("Per step", right=True), "Owned by",
)  # fmt: skip
_GROWN = (
    "Segments reserved at", "Phase", Column("Size", right=True, sums=True),
    Column("% of reserved", right=True, wide=True),
)  # fmt: skip


def steps_section(growth: StepGrowth | None, opened: Opened) -> Markup | None:
    """Draw memory from step to step, and what stays behind."""
    if growth is None or not has_trend(growth):
        return None
    left = draw_table(table(_LEFT_BEHIND, [_left_behind(entry, opened) for entry in growth.left_behind], ""))
    return section("steps", "From step to step", growth_words(growth), draw_table(steps_table(growth)), left)


def _left_behind(entry: LeftBehind, opened: Opened) -> TableRow:
    site = site_words(call_site(entry.stack), entry.stack)
    return TableRow((
        TextCell(site, folded=shown_stack(entry.stack), opens=opened(entry)),
        TextCell(category_label(entry.category), category=entry.category), str(entry.steps), entry.bytes,
        size(round(entry.bytes_per_step)), ", ".join(entry.held_by) or "not known",
    ))  # fmt: skip


def allocation_table(document: Document, opened: Opened) -> Markup | None:
    """List the largest allocations; each line opens to its evidence and stack."""
    if not document.allocations:
        return None
    active, moment = sum(p.bytes for p in document.summary.bar), document.summary.moment
    rows = document.allocations
    head = el(
        "tr", column("Allocation"), column("Category"), column("Size", True, sums=True),
        column(f"% of {moment}", True, "wide"), column("Made in", extra="wide"), column("Alive for", True, "wide"),
    )  # fmt: skip
    search = el("input", {
        "type": "search", "id": "filter", "placeholder": "Filter by tensor, file or function",
        "aria-label": "Filter allocations",
    })  # fmt: skip
    listed = f"{amount(sum(row.bytes for row in rows))} of {amount(active)}"
    note = f"the {thousands(sum(row.count for row in rows))} largest, {listed}; equal ones share a line"
    more = el("button", {"type": "button", "id": "more", "class": "needs-js"}, "Show all")
    body = el("tbody", *[_allocation_row(row, opened(row)) for row in rows])
    table = el("table.allocations", {"id": "allocation-table"}, el("thead", head), body)
    nothing = el("p", {"id": "nothing", "class": "muted", "role": "status"})
    tools = el("div.tools needs-js", search, _category_filter(rows), _size_filter())
    return section("allocations", f"Allocations alive at the {moment}", note, tools, nothing, scrolling(table), more)


def _category_filter(rows: Sequence[AllocationRow]) -> Markup:
    """Choose one of the categories that a table lists."""
    labels = dict(sorted({colour_class(row.category): row.label for row in rows}.items(), key=lambda item: item[1]))
    options = [el("option", {"value": name}, label) for name, label in labels.items()]
    attributes: dict[str, object] = {"id": "only-category", "aria-label": "Category"}
    return el("select", attributes, el("option", {"value": ""}, "All categories"), *options)


_LEAST = (1 << 20, 10 << 20, 100 << 20, 1 << 30)


def _size_filter() -> Markup:
    """Choose the smallest allocations to list: a row's sum may be larger."""
    options = [el("option", {"value": str(n)}, f"{amount(n)} or more each") for n in _LEAST]
    attributes: dict[str, object] = {"id": "least-bytes", "aria-label": "Size of each allocation"}
    return el("select", attributes, el("option", {"value": "0"}, "Any size"), *options)


def _allocation_row(allocation: AllocationRow, reference: str | None) -> Markup:
    evidence = allocation.group.evidence
    body: list[Child] = [
        el("p", el(f"span.evidence e-{evidence}", evidence), " ", allocation.why),
        el("p.muted", particulars(allocation)),
    ]
    if allocation.stack:
        body += folded_stack(allocation.stack)
    small = " · ".join(w for w in (allocation.shape, allocation.site if allocation.name else "") if w)
    summary = el(
        "summary",
        el("span.what", breakable(what(allocation))),
        el("span.badge guess", "inferred") if allocation.guessed else None,
        el("small.muted", small) if small else None,
    )
    category = allocation.label + (f", {allocation.detail}" if allocation.detail else "")
    return el(
        "tr",
        {
            "data-category": colour_class(allocation.category),
            "data-bytes": str(allocation.bytes),
            "data-each": str(allocation.group.each_bytes),
        },
        el("td", el("details", {"data-open": reference}, summary, *body)),
        el("td", swatch(allocation.category), category),
        el("td.num", {"data-bytes": str(allocation.bytes)}, amount(allocation.bytes)),
        el("td.num wide", f"{100 * allocation.share:.1f}"),
        el("td.wide", allocation.phase_label),
        el("td.num wide", allocation.lifetime),
    )


def phases_section(rows: TableBlock | None) -> Markup | None:
    """List every phase with its highest peak."""
    note = "repeats share a row, which shows the highest peak"
    return section("phases", "Phases", note, draw_table(rows)) if rows else None


def device_peak_table(document: Document, opened: Opened) -> Markup | None:
    """List the lines for which the allocator reserved more memory of the GPU."""
    peak = document.report.device_peak
    if (reserved := peak.reserved_bytes) is None:
        return None
    lines = []
    for grown in document.grown_by[:12]:
        site = site_words(call_site(grown.stack), grown.stack)
        name = TextCell(site, folded=shown_stack(grown.stack), opens=opened(grown))
        phase = phase_label(grown.phase) if grown.phase else ""
        lines.append(TableRow((name, phase, grown.bytes, percent(grown.bytes, reserved))))
    outside = f" and {amount(peak.non_torch_bytes)} of non-PyTorch memory" if peak.non_torch_bytes else ""
    where = where_words(peak.phase, peak.step)
    return section(
        "device-peak",
        "Device peak",
        f"{amount(reserved)} reserved{outside}, in {where}; a GPU with less memory runs out of it",
        draw_table(table(_GROWN, lines, "")),
    )
