"""Small pieces the page's sections share."""

from __future__ import annotations

from collections.abc import Sequence

from memprof.reports.markup import Child, Markup, el
from memprof.reports.model import Allocation, Fact, Part
from memprof.reports.palette import slug
from memprof.reports.text import gib, thousands

__all__ = ["bar", "colour_class", "column", "fact_list", "section", "stack_details", "swatch", "what"]

_DEVICE_PARTS = {"cached", "inactive_split", "private_pools", "non_torch", "free"}


def section(identifier: str, title: str, note: str, *children: Child) -> Markup:
    heading = el("h2", {"id": f"{identifier}-title"}, title, el("small", {}, note) if note else None)
    return el("section", {"id": identifier, "aria-labelledby": f"{identifier}-title"}, heading, *children)


def swatch(identifier: str) -> Markup:
    return el("i", {"class": f"swatch c-{colour_class(identifier)}", "aria-hidden": "true"})


def colour_class(identifier: str) -> str:
    return identifier if identifier in _DEVICE_PARTS else slug(identifier)


def bar(parts: Sequence[Part], scale: int, *, labels: bool = False, described: str = "") -> Markup:
    segments = []
    for part in parts:
        width = 100 * part.bytes / scale
        style = f"width:{width:.4f}%"
        text = el("b", {}, part.label) if labels and width > 1.1 * len(part.label) and part.id != "free" else None
        title = f"{part.label}: {gib(part.bytes)} GiB"
        segments.append(el("span", {"class": f"seg c-{colour_class(part.id)}", "style": style, "title": title}, text))
    return el("div", {"class": "bar big" if labels else "bar", "role": "img", "aria-label": described}, *segments)


def stack_details(frames: Sequence[str], title: str) -> Markup | None:
    if not frames:
        return None
    return el("details", {}, el("summary", {}, title), el("pre", {"tabindex": "0"}, "\n".join(frames)))


def column(text: str, numeric: bool = False, extra: str = "") -> Markup:
    return el(
        "th", {"scope": "col", "class": " ".join(c for c in ("num" if numeric else "", extra) if c) or None}, text
    )


def fact_list(facts: Sequence[Fact]) -> Markup:
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


def what(allocation: Allocation) -> str:
    label = allocation.name or allocation.site or allocation.detail or allocation.category_label
    return f"{label} ×{thousands(allocation.count)}" if allocation.count > 1 else label
