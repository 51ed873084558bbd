"""Draw the page's tables: components, steps, allocations, phases, what grew the device peak."""

from __future__ import annotations

from collections.abc import Sequence

from memprof.reports.document.blocks import Line, Table, Words, table
from memprof.reports.document.model import Allocation, DevicePeak, Document, Row, Steps
from memprof.reports.document.tables import component_table, site_words
from memprof.reports.document.text import size, thousands
from memprof.reports.html.elements import (
    Markup,
    breakable,
    colour_class,
    column,
    copyable,
    draw_table,
    el,
    scrolling,
    section,
    swatch,
    what,
)
from memprof.reports.html.opened import Opened, particulars

from memprof.units import amount, percent


def component_section(rows: Sequence[Row], moment: str) -> Markup:
    """Draw the published table's rows, down to categories and details."""
    note = f"values at the {moment} add up"
    if moment == "peak":
        note += "; own peaks are each row's highest at any time and need not coincide"
    return section("components", f"What the {moment} is made of", note, draw_table(component_table(rows, moment)))


def steps_table(steps: Steps | None, opened: Opened) -> Markup | None:
    """Draw memory from step to step, and what stays behind."""
    if steps is None:
        return None
    return section("steps", "From step to step", steps.sentence, draw_table(steps.steps), _left_behind(steps, opened))


def _left_behind(steps: Steps, opened: Opened) -> Markup | None:
    lines = [
        Line((
            Words(site_words(x.site, x.stack), folded=x.stack, opens=opened(x)),
            Words(x.category_label, category=x.category), str(x.steps), size(x.bytes), size(round(x.bytes_per_step)),
            ", ".join(x.held_by) or "not known",
        ))
        for x in steps.left_behind
    ]  # fmt: skip
    return draw_table(table("Left behind in several steps|Category|Steps>|In all>|A step>|Held by", lines, ""))


def allocation_table(document: Document, opened: Opened) -> Markup | None:
    """List the largest allocations; each line opens to its evidence and stack."""
    if not document.allocations:
        return None
    active, moment = sum(p.bytes for p in document.summary.bar), document.summary.moment
    head = el(
        "tr", column("Allocation"), column("Category"), column("Size", True), column(f"% of {moment}", True, "wide"),
        column("Made in", extra="wide"), column("Alive for", True, "wide"),
    )  # fmt: skip
    search = el("input", {
        "type": "search", "id": "filter", "class": "needs-js", "placeholder": "Filter by tensor, file or function",
        "aria-label": "Filter allocations",
    })  # fmt: skip
    listed = f"{amount(document.allocations_bytes)} of {amount(active)}"
    note = f"the {thousands(document.allocations_listed)} largest, {listed}; equal ones share a line"
    more = el("button", {"type": "button", "id": "more", "class": "needs-js"}, "Show all")
    rows = [_allocation_row(a, opened(a)) for a in document.allocations]
    table = el("table.allocations", {"id": "allocation-table"}, el("thead", head), el("tbody", *rows))
    nothing = el("p", {"id": "nothing", "class": "muted", "role": "status"})
    found = scrolling(table)
    return section("allocations", f"Allocations alive at the {moment}", note, search, found, nothing, more)


def _allocation_row(allocation: Allocation, reference: str | None) -> Markup:
    body = [
        el("p", el(f"span.evidence e-{allocation.evidence}", allocation.evidence), " ", allocation.why),
        el("p.muted", particulars(allocation)),
    ]
    if allocation.stack:
        body.append(copyable(code="\n".join(allocation.stack)))
    small = " · ".join(w for w in (allocation.shape, allocation.site if allocation.name else "") if w)
    summary = el(
        "summary",
        el("span.what", breakable(what(allocation))),
        el("span.badge guess", "guessed") if allocation.guessed else None,
        el("small.muted", small) if small else None,
    )
    category = allocation.category_label + (f", {allocation.detail}" if allocation.detail else "")
    return el(
        "tr",
        {"data-category": colour_class(allocation.category)},
        el("td", el("details", {"data-open": reference}, summary, *body)),
        el("td", swatch(allocation.category), category),
        el("td.num", amount(allocation.bytes)),
        el("td.num wide", f"{100 * allocation.share:.1f}"),
        el("td.wide", allocation.phase_label),
        el("td.num wide", allocation.lifetime),
    )


def phases_section(rows: Table | None) -> Markup | None:
    """List every phase with its highest peak."""
    note = "repeats share a row, which shows the highest peak"
    return section("phases", "Phases", note, draw_table(rows)) if rows else None


def device_peak_table(peak: DevicePeak | None, opened: Opened) -> Markup | None:
    """List what made the allocator take more from the device."""
    if peak is None:
        return None
    lines = [
        Line((
            Words(site_words(g.site, g.stack), folded=g.stack, opens=opened(g)), g.phase, g.bytes,
            percent(g.bytes, peak.reserved_bytes),
        ))
        for g in peak.grown_by[:12]
    ]  # fmt: skip
    rows = table("What made the allocator ask for more|Phase|Size>|of reserved>~", lines, "")
    outside = f" + {amount(peak.non_torch_bytes)} outside torch" if peak.non_torch_bytes else ""
    return section(
        "device-peak",
        "Device peak",
        f"{amount(peak.reserved_bytes)} reserved{outside}, in {peak.where}: this decides an out-of-memory error",
        draw_table(rows),
    )
