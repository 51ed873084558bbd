"""Draw the timeline with its panel, and the icicle."""

from __future__ import annotations

from collections.abc import Sequence

from memprof.reports.document.model import Document, Node, TimelineSeries
from memprof.reports.document.tables import SMALLEST_BOX
from memprof.reports.document.text import duration
from memprof.reports.html.elements import Markup, colour_class, el, section, swatch, what
from memprof.reports.html.opened import Opened
from memprof.reports.html.static_timeline import timeline_svg

from memprof.units import amount, percent


def timeline_section(document: Document, opened: Opened) -> Markup | None:
    """Draw the timeline: the static picture that paints first, the chart that replaces it, and the panel."""
    return timelines_section([("", document)], [opened])


def timelines_section(runs: Sequence[tuple[str, Document]], opened: Sequence[Opened]) -> Markup | None:
    """Draw the timelines of several runs, under their labels and on one scale; the chart shows one at a time."""
    drawn = [(label, document, document.timeline) for label, document in runs if document.timeline]
    if not drawn:
        return None
    highest = max(timeline.highest_bytes for _, _, timeline in drawn)
    switch = _choice("run", [(str(i), label) for i, (label, _, _) in enumerate(drawn)]) if len(drawn) > 1 else None
    timed = all(timeline.timed for _, _, timeline in drawn)
    events = (("event", "Events"),) if timed and any(timeline.instants for _, _, timeline in drawn) else ()
    by_allocation = None
    if all(document.individuals for _, document, _ in drawn):
        by_allocation = _choice("by", (("category", "By category"), ("allocation", "By allocation")))
    tools = el(
        "div.tools needs-js",
        {"role": "toolbar", "aria-label": "Timeline"},
        switch,
        by_allocation,
        _choice("axis", (*events, ("phase", "Phases"), ("time", "Time" if timed else "Events")), "phase"),
        _choice("range", (("all", "Whole run"), ("peak", "Around the peak"))),
        el("button", {"type": "button", "id": "patterns", "aria-pressed": "false"}, "Patterns"),
        el(
            "span.muted keys",
            *[
                (el("kbd", key), f" {what} ")
                for key, what in (("←→", "move"), ("[ ]", "phase"), ("P", "peak"), ("+−", "zoom"))
            ],
        ),
    )
    label = (
        "Timeline. Left and right move the cursor, brackets jump between phases, P goes to the peak, plus and minus "
        "zoom. By allocation, up and down select an allocation, and Escape clears the selection."
    )
    chart = el("div", {"id": "chart", "tabindex": "0", "role": "application", "aria-label": label})
    pictures = [_picture(label, timeline, highest) for label, _, timeline in drawn]
    plot = el("div.plot", *pictures, chart, el("div", {"id": "cursor", "hidden": True}))
    dotted = any(timeline.reserved for _, _, timeline in drawn)
    note = f"each pixel column shows its highest moment{'; dotted line is reserved memory' if dotted else ''}"
    return section(
        "timeline",
        "Timeline",
        note + ("; one scale for all runs" if len(drawn) > 1 else ""),
        tools,
        el("div.split", plot, _panel(drawn[0][1], opened[0])),
        _axis_note(drawn[0][2] if len(drawn) == 1 else None),
    )


def _picture(label: str, timeline: TimelineSeries, highest: int) -> Markup:
    caption = el("figcaption", label) if label else None
    return el("figure.picture", caption, timeline_svg(timeline, highest=highest))


def _axis_note(timeline: TimelineSeries | None) -> Markup:
    """Explain the axis; the script writes the other note when the other axis is chosen."""
    long = f"; the recording is {duration(timeline.time_us[-1])} long" if timeline and timeline.timed else ""
    keys = "Drag to zoom, double-click to reset, click to fix the cursor."
    phase = f"Phases are drawn equally wide, the time between them narrower{long}. {keys}"
    time = f"Drawn by the recording's clock{long}. {keys}"
    event = f"Every allocation and every free is drawn equally wide{long}. {keys}"
    notes = {"data-phase": phase, "data-time": time, "data-event": event}
    return el("p.muted caption", {"id": "axis-note", **notes}, phase)


def _choice(name: str, options: Sequence[tuple[str, str]], chosen: str | None = None) -> Markup:
    first = chosen or options[0][0]
    buttons = [
        el(
            "button",
            {
                "type": "button", "data-choice": name, "data-value": value,
                "aria-pressed": "true" if value == first else "false",
            },
            label,
        )
        for value, label in options
    ]  # fmt: skip
    return el("span.group", {"role": "group"}, *buttons)


def _panel(document: Document, opened: Opened) -> Markup:
    """List what is alive at the cursor; before the script runs, at the peak."""
    parts = sorted(document.summary.bar, key=lambda p: -p.bytes)
    active = sum(p.bytes for p in parts)
    items = [el("li", swatch(p.id), el("span", p.label), el("b", amount(p.bytes))) for p in parts]
    largest = [
        el(
            "li",
            {"title": " · ".join(w for w in (a.label, a.shape, a.site, a.why) if w), "data-open": opened(a)},
            swatch(a.category, inferred=a.guessed),
            el("span", what(a)),
            el("b", amount(a.bytes)),
        )
        for a in document.allocations[:7]
    ]
    return el(
        "aside",
        {"id": "panel", "aria-live": "polite", "aria-label": "Alive at the cursor"},
        el("h3", {"id": "panel-title"}, "Peak"),
        el("p.muted", {"id": "panel-where"}, document.summary.where),
        el("p.panel-total", el("strong", {"id": "panel-total"}, amount(active))),
        el("ul", {"id": "panel-parts"}, *items),
        el("h3", {"id": "panel-largest-title"}, "Largest alive"),
        el("ul", {"id": "panel-largest"}, *largest),
    )


def icicle_section(root: Node, opened: Opened, moment: str = "peak") -> Markup | None:
    """Draw the peak as nested boxes; a tensor's box opens what is known of it."""
    if not root.bytes:
        return None
    return section(
        "icicle",
        "Allocated at",
        "category › call site › tensor; press a box to zoom, the top one to go back, a tensor to see its stack",
        el("p", {"id": "icicle-found", "class": "muted fine", "role": "status"}),
        el(
            "div.icicle",
            {"id": "icicle-root", "role": "group", "aria-label": "Boxes; arrow keys move"},
            _node(root, root.bytes, root.bytes, 0, opened, moment),
        ),
    )


def _node(node: Node, total: int, parent: int, depth: int, opened: Opened, moment: str) -> Markup:
    children, small = [], 0
    for child in node.children:
        if child.bytes * SMALLEST_BOX < total:
            small += child.bytes
        else:
            children.append(child)
    if small:
        children.append(Node("smaller ones", node.category, small))
    guess = node.allocation is not None and node.allocation.guessed
    share = f"{percent(node.bytes, total)} of the {moment}{', inferred' if guess else ''}"
    words = f"{node.label}, {amount(node.bytes)}, {share}"
    colour = f"c-{colour_class(node.category)}" + (" guess" if guess else "") if node.category else "root"
    button = el(
        "button",
        {
            "type": "button",
            "class": f"box {colour}",
            "title": words,
            "data-open": opened(node.allocation),
            "data-bytes": str(node.bytes),
        },
        el("span.label", {"data-shorter": "\n".join(node.shorter) or None}, node.label),
        el("b", amount(node.bytes)),
        el("span.sr", f", {share}"),
    )
    kids = [_node(child, total, node.bytes, depth + 1, opened, moment) for child in children]
    below = el("div.kids", *kids) if kids else None
    category = colour_class(node.category) if depth == 1 else None
    style = f"flex:{100 * node.bytes / (parent or 1):.3f} 1 0"
    return el(f"div.node d{depth}", {"style": style, "data-category": category}, button, below)
