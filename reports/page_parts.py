"""Small pieces the page's sections share."""

from __future__ import annotations

import re
from collections.abc import Sequence

from memprof.reports.markup import Child, Markup, el, join
from memprof.reports.model import Allocation, Fact, Part
from memprof.reports.palette import slug
from memprof.reports.text import gib, thousands

__all__ = ["bar", "breakable", "colour_class", "column", "fact_list", "section", "stack_details", "swatch", "what"]

_OWN_COLOUR = {"training", "cached", "inactive_split", "private_pools", "non_torch", "free"}


def section(identifier: str, title: str, note: str, *children: Child) -> Markup:
    """A titled section; ``note`` stands small beside its title."""
    heading = el("h2", {"id": f"{identifier}-title"}, title, el("small", {}, note) if note else None)
    return el("section", {"id": identifier, "aria-labelledby": f"{identifier}-title"}, heading, *children)


def swatch(identifier: str) -> Markup:
    """A square in a category's colour."""
    return el("i", {"class": f"swatch c-{colour_class(identifier)}", "aria-hidden": "true"})


def colour_class(identifier: str) -> str:
    """The CSS class that colours a category, one of the parts of a device, or a published row."""
    return identifier if identifier in _OWN_COLOUR else slug(identifier)


def bar(parts: Sequence[Part], scale: int, *, labels: bool = False, described: str = "") -> Markup:
    """Parts side by side, ``scale`` bytes wide; ``described`` says the same to a screen reader."""
    segments = []
    for part in parts:
        width = 100 * part.bytes / scale
        style = f"width:{width:.4f}%"
        text = el("b", {}, part.label) if labels and width > 1.1 * len(part.label) and part.id != "free" else None
        title = f"{part.label}: {gib(part.bytes)} GiB"
        segments.append(el("span", {"class": f"seg c-{colour_class(part.id)}", "style": style, "title": title}, text))
    return el("div", {"class": "bar big" if labels else "bar", "role": "img", "aria-label": described}, *segments)


def stack_details(frames: Sequence[str], title: str) -> Markup | None:
    """A stack that opens under ``title``."""
    if not frames:
        return None
    return el("details", {}, el("summary", {}, title), el("pre", {"tabindex": "0"}, "\n".join(frames)))


def column(text: str, numeric: bool = False, extra: str = "") -> Markup:
    """A table column's heading."""
    return el(
        "th", {"scope": "col", "class": " ".join(c for c in ("num" if numeric else "", extra) if c) or None}, text
    )


def fact_list(facts: Sequence[Fact]) -> Markup:
    """Labelled facts, one a line."""
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
    """What a line of allocations is called: its name, else where it was made."""
    label = allocation.name or allocation.site or allocation.detail or allocation.category_label
    return f"{label} ×{thousands(allocation.count)}" if allocation.count > 1 else label


def breakable(text: str) -> Markup:
    """Text that may break after a slash or an underscore: paths in narrow columns."""
    return join(*[(part, el("wbr")) if part in ("/", "_") else part for part in re.split(r"([/_])", text)])
