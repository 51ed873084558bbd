"""The page's sections, top to bottom, as markup; each takes its part of the document and returns nothing when empty."""

from __future__ import annotations

from collections.abc import Sequence

from memprof.reports.markup import Child, Markup, el, join
from memprof.reports.model import (
    AddsUp,
    Advice,
    Allocation,
    DevicePeak,
    Document,
    EvidenceShare,
    Fact,
    Node,
    Oom,
    Part,
    PhaseRow,
    Row,
    Summary,
    Timeline,
)
from memprof.reports.palette import slug
from memprof.reports.svg import timeline_svg
from memprof.reports.text import duration, gib, percent, signed_gib, size, thousands

__all__ = ["page_body"]


def page_body(document: Document) -> Markup:
    """Everything between the page's header and its footer."""
    return join(
        _header(document),
        el(
            "main",
            {"id": "main"},
            _oom(document.oom),
            _summary(document.summary, document.badge),
            _advice(document.advice),
            _rows(document.rows),
            _timeline(document.timeline, document),
            _icicle(document.icicle),
            _allocations(document),
            _phases(document.phases),
            _device_peak(document.device_peak),
            _bottom(document),
        ),
    )


def _header(document: Document) -> Markup:
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
            el("h1", {}, document.title),
            el("p", {"class": "muted sub"}, " · ".join(document.subtitle)),
        ),
        el("div", {"class": "buttons"}, *buttons),
    )


def _section(identifier: str, title: str, note: str, *children: Child) -> Markup:
    heading = el("h2", {"id": f"{identifier}-title"}, title, el("small", {}, note) if note else None)
    return el("section", {"id": identifier, "aria-labelledby": f"{identifier}-title"}, heading, *children)


def _swatch(identifier: str) -> Markup:
    return el("i", {"class": f"swatch c-{_colour(identifier)}", "aria-hidden": "true"})


_DEVICE_PARTS = {"cached", "inactive_split", "private_pools", "non_torch", "free"}


def _colour(identifier: str) -> str:
    return identifier if identifier in _DEVICE_PARTS else slug(identifier)


def _bar(parts: Sequence[Part], scale: int, *, labels: bool = False, described: str = "") -> Markup:
    segments = []
    for part in parts:
        width = 100 * part.bytes / scale
        style = f"width:{width:.4f}%"
        text = el("b", {}, part.label) if labels and width > 1.1 * len(part.label) and part.id != "free" else None
        title = f"{part.label}: {gib(part.bytes)} GiB"
        segments.append(el("span", {"class": f"seg c-{_colour(part.id)}", "style": style, "title": title}, text))
    return el("div", {"class": "bar big" if labels else "bar", "role": "img", "aria-label": described}, *segments)


def _oom(oom: Oom | None) -> Markup | None:
    if oom is None:
        return None
    return el(
        "div",
        {"class": "banner", "role": "alert", "id": "oom"},
        el("p", {}, el("strong", {}, oom.sentence)),
        _stack(oom.stack, "Where it was asked for"),
    )


def _stack(frames: Sequence[str], title: str) -> Markup | None:
    if not frames:
        return None
    return el("details", {}, el("summary", {}, title), el("pre", {"tabindex": "0"}, "\n".join(frames)))


def _summary(summary: Summary, badge: str) -> Markup:
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
        _bar((*summary.bar, *summary.rest), summary.scale_bytes, labels=True, described=_bar_words(summary)),
        _bar_axis(summary),
        el("ul", {"class": "legend"}, *[_legend(p) for p in (*summary.bar, *summary.rest)]),
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
    return el("li", {}, _swatch(part.id), part.label, " ", el("span", {"class": "muted"}, gib(part.bytes)))


def _advice(advice: Sequence[Advice]) -> Markup | None:
    if not advice:
        return None
    items = [
        el(
            "li",
            {},
            el(
                "div",
                {"class": "saves"},
                el("strong", {}, f"{signed_gib(-a.saves_bytes)} GiB"),
                el("span", {"class": "muted"}, a.basis),
            ),
            el("div", {}, el("strong", {}, a.action), el("div", {"class": "muted"}, a.costs)),
        )
        for a in advice
    ]
    return _section(
        "advice",
        "What would lower the peak",
        "ranked by the bytes each change saves",
        el("ol", {"class": "advice"}, *items),
    )


def _th(text: str, numeric: bool = False, extra: str = "") -> Markup:
    return el(
        "th", {"scope": "col", "class": " ".join(c for c in ("num" if numeric else "", extra) if c) or None}, text
    )


def _rows(rows: Sequence[Row]) -> Markup:
    total = rows[-1].at_peak or 1
    body: list[Child] = []
    for row in rows:
        body.append(_row(row, 0, total, ""))
        for child in row.children:
            body.append(_row(child, 1, total, row.id))
            body += [_row(detail, 2, total, f"{row.id}/{child.id}") for detail in child.children]
    head = el(
        "tr",
        {},
        _th("Component"),
        _th("At the peak", True),
        _th("", extra="wide"),
        _th("% of peak", True, "wide"),
        _th("Own peak", True),
    )
    return _section(
        "components",
        "What the peak is made of",
        "GiB; values at one instant add up, own peaks are each row's highest at any time and need not fall together",
        el(
            "div",
            {"class": "scroll"},
            el("table", {"class": "components"}, el("thead", {}, head), el("tbody", {}, *body)),
        ),
    )


def _row(row: Row, level: int, total: int, parent: str) -> Markup:
    path = f"{parent}/{row.id}" if parent else row.id
    colour = row.id if level == 1 else parent.rpartition("/")[2] if level == 2 else ""
    if level == 0 and row.children:
        colour = row.children[0].id
    if row.id == "unattributed":
        colour = "unattributed"
    width = f"width:{100 * row.at_peak / total:.4f}%"
    bar = el("span", {"class": f"seg c-{_colour(colour)}" if row.id != "total" else "seg c-total", "style": width})
    own = "–" if row.own_peak is None else gib(row.own_peak)
    return el(
        "tr",
        {
            "class": f"level{level}" + (" total" if row.id == "total" else ""),
            "data-path": path,
            "data-parent": parent or None,
        },
        el("th", {"scope": "row", "title": row.words or None}, _swatch(colour) if level == 1 else None, row.label),
        el("td", {"class": "num"}, gib(row.at_peak)),
        el("td", {"class": "wide"}, el("div", {"class": "bar thin"}, bar)),
        el("td", {"class": "num wide"}, percent(row.at_peak, total)),
        el("td", {"class": "num"}, own),
    )


def _timeline(timeline: Timeline | None, document: Document) -> Markup | None:
    if timeline is None:
        return None
    tools = el(
        "div",
        {"class": "tools needs-js", "role": "toolbar", "aria-label": "Timeline"},
        _choice("range", (("all", "Whole run"), ("peak", "Around the peak"))),
        _choice("axis", (("phase", "By phase"), ("time", "By time"))),
        el("button", {"type": "button", "id": "patterns", "aria-pressed": "false"}, "Patterns"),
        el(
            "span",
            {"class": "muted keys"},
            *[
                (el("kbd", {}, key), f" {what} ")
                for key, what in (("←→", "move"), ("[ ]", "phase"), ("P", "peak"), ("+−", "zoom"))
            ],
        ),
    )
    label = (
        "Timeline. Arrow keys move the cursor, brackets jump between phases, P goes to the peak, plus and minus zoom."
    )
    chart = el("div", {"id": "chart", "tabindex": "0", "role": "application", "aria-label": label})
    plot = el("div", {"class": "plot"}, timeline_svg(timeline), chart, el("div", {"id": "cursor", "hidden": True}))
    return _section(
        "timeline",
        "Timeline",
        f"each pixel column shows its highest moment{'; dotted line is reserved memory' if timeline.reserved else ''}",
        tools,
        el("div", {"class": "split"}, plot, _panel(document)),
        el("p", {"class": "muted caption", "id": "axis-note"}, _axis_note(timeline)),
    )


def _axis_note(timeline: Timeline) -> str:
    length = duration(timeline.time_us[-1])
    keys = "Drag to zoom, double-click to reset, click to hold the cursor."
    return f"Phases are drawn equally wide; the recording is {length} long. {keys}"


def _choice(name: str, options: Sequence[tuple[str, str]]) -> Markup:
    buttons = [
        el(
            "button",
            {"type": "button", "data-choice": name, "data-value": value, "aria-pressed": "true" if i == 0 else "false"},
            label,
        )
        for i, (value, label) in enumerate(options)
    ]
    return el("span", {"class": "group", "role": "group"}, *buttons)


def _panel(document: Document) -> Markup:
    """What is alive at the cursor; from Python it shows the peak."""
    parts = sorted(document.summary.bar, key=lambda p: -p.bytes)
    active = sum(p.bytes for p in parts)
    items = [el("li", {}, _swatch(p.id), el("span", {}, p.label), el("b", {}, gib(p.bytes))) for p in parts]
    largest = [
        el(
            "li",
            {"title": _allocation_title(a)},
            _swatch(a.category),
            el("span", {}, _what(a)),
            el("b", {}, gib(a.bytes)),
        )
        for a in document.allocations[:7]
    ]
    return el(
        "aside",
        {"id": "panel", "aria-live": "polite", "aria-label": "Alive at the cursor"},
        el("h3", {"id": "panel-title"}, "Peak"),
        el("p", {"class": "muted", "id": "panel-where"}, document.summary.where),
        el("p", {"class": "panel-total"}, el("strong", {"id": "panel-total"}, gib(active)), " GiB"),
        el("ul", {"id": "panel-parts"}, *items),
        el("h3", {"id": "panel-largest-title"}, "Largest alive"),
        el("ul", {"id": "panel-largest"}, *largest),
    )


def _what(allocation: Allocation) -> str:
    label = allocation.name or allocation.site or allocation.detail or allocation.category_label
    return f"{label} ×{thousands(allocation.count)}" if allocation.count > 1 else label


def _allocation_title(allocation: Allocation) -> str:
    return " · ".join(w for w in (allocation.category_label, allocation.shape, allocation.site, allocation.why) if w)


def _icicle(root: Node) -> Markup | None:
    if not root.bytes:
        return None
    return _section(
        "icicle",
        "Where it was made",
        "category › call site › tensor; press a box to zoom, the top one to go back",
        el("div", {"class": "icicle", "id": "icicle-root"}, _node(root, root.bytes, root.bytes, 0)),
    )


def _node(node: Node, total: int, parent: int, depth: int) -> Markup:
    children, small = [], 0
    for child in node.children:
        if child.bytes * 250 < total:
            small += child.bytes
        else:
            children.append(child)
    if small:
        children.append(Node("smaller ones", node.category, small))
    words = f"{node.label}, {gib(node.bytes)} GiB, {percent(node.bytes, total)} of the peak"
    colour = f"c-{_colour(node.category)}" if node.category else "root"
    button = el(
        "button",
        {"type": "button", "class": f"box {colour}", "title": words, "aria-label": words},
        el("span", {}, node.label),
        el("b", {}, gib(node.bytes)),
    )
    below = (
        el("div", {"class": "kids"}, *[_node(c, total, node.bytes, depth + 1) for c in children]) if children else None
    )
    return el(
        "div", {"class": f"node d{depth}", "style": f"flex:{100 * node.bytes / (parent or 1):.3f} 1 0"}, button, below
    )


def _allocations(document: Document) -> Markup | None:
    if not document.allocations:
        return None
    active = sum(p.bytes for p in document.summary.bar)
    head = el(
        "tr",
        {},
        *[
            _th("Allocation"),
            _th("Category"),
            _th("GiB", True),
            _th("% of peak", True, "wide"),
            _th("Made in", extra="wide"),
            _th("Alive for", True, "wide"),
        ],
    )
    search = el(
        "input",
        {
            "type": "search",
            "id": "filter",
            "class": "needs-js",
            "placeholder": "Filter by tensor, file or function",
            "aria-label": "Filter allocations",
        },
    )
    listed = f"{gib(document.allocations_bytes)} of {gib(active)} GiB"
    note = f"the {thousands(document.allocations_listed)} largest, {listed}; alike ones are one line"
    rows = [_allocation_row(a) for a in document.allocations]
    table = el(
        "table", {"class": "allocations", "id": "allocation-table"}, el("thead", {}, head), el("tbody", {}, *rows)
    )
    return _section("allocations", "Allocations alive at the peak", note, search, el("div", {"class": "scroll"}, table))


def _allocation_row(allocation: Allocation) -> Markup:
    body = [
        el(
            "p",
            {},
            el("span", {"class": f"evidence e-{allocation.evidence}"}, allocation.evidence),
            " ",
            allocation.why,
        ),
        el("p", {"class": "muted"}, _particulars(allocation)),
    ]
    if allocation.stack:
        body.append(el("pre", {"tabindex": "0"}, "\n".join(allocation.stack)))
    small = " · ".join(w for w in (allocation.shape, allocation.site if allocation.name else "") if w)
    summary = el(
        "summary",
        {},
        el("span", {"class": "what"}, _what(allocation)),
        el("small", {"class": "muted"}, small) if small else None,
    )
    category = allocation.category_label + (f", {allocation.detail}" if allocation.detail else "")
    return el(
        "tr",
        {},
        el("td", {}, el("details", {}, summary, *body)),
        el("td", {}, _swatch(allocation.category), category),
        el("td", {"class": "num"}, gib(allocation.bytes)),
        el("td", {"class": "num wide"}, f"{100 * allocation.share:.1f}"),
        el("td", {"class": "wide"}, allocation.phase_label),
        el("td", {"class": "num wide"}, allocation.lifetime),
    )


def _particulars(allocation: Allocation) -> str:
    many = (
        f"{thousands(allocation.count)} blocks of {size(allocation.each_bytes)} each, the first at "
        if allocation.count > 1
        else "at "
    )
    outlives = "; outlives the step or phase that made it" if allocation.retained else ""
    return f"{many}{allocation.address}, alive {allocation.lifetime}{outlives}"


def _phases(phases: Sequence[PhaseRow]) -> Markup | None:
    if not phases:
        return None
    scale = max(p.peak_bytes for p in phases) or 1
    head = el(
        "tr",
        {},
        _th("Phase"),
        _th("Time", True),
        _th("of the run", True, "wide"),
        _th("Peak, GiB", True),
        _th("What was alive at that phase's peak", extra="wide"),
    )
    rows = [_phase_row(p, scale) for p in phases]
    return _section(
        "phases",
        "Phases",
        "repeats folded, the worst one shown",
        el("div", {"class": "scroll"}, el("table", {"class": "phases"}, el("thead", {}, head), el("tbody", {}, *rows))),
    )


def _phase_row(row: PhaseRow, scale: int) -> Markup:
    low = f"{gib(row.low_bytes)} – " if gib(row.low_bytes) != gib(row.peak_bytes) else ""
    return el(
        "tr",
        {},
        el(
            "th",
            {"scope": "row"},
            el("i", {"class": f"swatch p-{slug(row.phase)}", "aria-hidden": "true"}),
            row.label,
            el("span", {"class": "badge"}, f"×{row.count}") if row.count > 1 else None,
            el("span", {"class": "badge peak"}, "peak") if row.is_peak else None,
        ),
        el("td", {"class": "num"}, duration(row.total_us)),
        el("td", {"class": "num wide"}, f"{100 * row.time_share:.0f} %"),
        el("td", {"class": "num"}, el("span", {"class": "muted"}, low), el("b", {}, gib(row.peak_bytes))),
        el(
            "td",
            {"class": "wide"},
            _bar(row.parts, scale, described=", ".join(f"{p.label} {gib(p.bytes)} GiB" for p in row.parts)),
        ),
    )


def _device_peak(peak: DevicePeak | None) -> Markup | None:
    if peak is None:
        return None
    rows = [
        el(
            "tr",
            {},
            el(
                "td",
                {},
                el(
                    "details",
                    {},
                    el("summary", {}, g.site or "no stack recorded"),
                    el("pre", {"tabindex": "0"}, "\n".join(g.stack)),
                )
                if g.stack
                else g.site or "no stack recorded",
            ),
            el("td", {}, g.phase),
            el("td", {"class": "num"}, gib(g.bytes)),
            el("td", {"class": "num wide"}, percent(g.bytes, peak.reserved_bytes)),
        )
        for g in peak.grown_by[:12]
    ]
    head = el(
        "tr",
        {},
        _th("Made the allocator ask for more"),
        _th("Phase"),
        _th("GiB", True),
        _th("of reserved", True, "wide"),
    )
    outside = f" + {gib(peak.non_torch_bytes)} outside torch" if peak.non_torch_bytes else ""
    return _section(
        "device-peak",
        "Device peak",
        f"{gib(peak.reserved_bytes)} GiB reserved{outside}, in {peak.where}: what decides an out-of-memory error",
        el("div", {"class": "scroll"}, el("table", {}, el("thead", {}, head), el("tbody", {}, *rows))),
    )


def _bottom(document: Document) -> Markup:
    return join(
        el(
            "div",
            {"class": "columns"},
            _adds_up(document.adds_up),
            join(_evidence(document.evidence), _notes(document.notes)),
        ),
        el("div", {"class": "columns"}, _reproduce(document), _host(document.host)),
    )


def _adds_up(sums: AddsUp) -> Markup:
    marks = {True: ("ok", "equal"), False: ("bad", "differs"), None: ("muted", "")}
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
    return _section(
        "adds-up",
        "Does it add up?",
        verdict,
        el("div", {"class": "scroll"}, el("table", {"class": "plain"}, el("tbody", {}, *rows))),
    )


def _evidence(shares: Sequence[EvidenceShare]) -> Markup:
    rows = [
        el(
            "tr",
            {},
            el("th", {"scope": "row"}, el("span", {"class": f"evidence e-{s.id}"}, s.id)),
            el("td", {"class": "num"}, gib(s.bytes)),
            el("td", {"class": "num"}, f"{100 * s.share:.1f} %"),
            el("td", {"class": "muted"}, s.words),
        )
        for s in shares
    ]
    return _section(
        "evidence",
        "How it is known",
        "GiB at the peak by kind of evidence",
        el("div", {"class": "scroll"}, el("table", {"class": "plain"}, el("tbody", {}, *rows))),
    )


def _notes(notes: Sequence[str]) -> Markup | None:
    if not notes:
        return None
    return _section(
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
            el("div", {"class": "scroll"}, el("table", {"class": "plain"}, el("tbody", {}, *rows))),
        )
    return _section("reproduce", "Reproduce", "", _facts(document.reproduce), config)


def _facts(facts: Sequence[Fact]) -> Markup:
    code = ("Command", "Every allocation")
    pairs = []
    for fact in facts:
        value = el("code", {}, fact.value) if fact.label in code else fact.value
        pairs.append(
            el(
                "div",
                {},
                el("dt", {"class": "muted"}, fact.label),
                el("dd", {}, value, " ", el("span", {"class": "muted"}, fact.note)),
            )
        )
    return el("dl", {"class": "pairs"}, *pairs)


def _host(host: Sequence[Fact]) -> Markup | None:
    return _section("host", "Host memory", "", _facts(host)) if host else None
