"""Make elements with everything escaped: the only way text gets into a page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Union

from memprof.reports.document.blocks import Cell, Column, Table, Words
from memprof.reports.document.model import Allocation, Fact, Part
from memprof.reports.document.text import CATEGORY_WORDS, amount, thousands
from memprof.reports.palette import slug

__all__ = [
    "Child",
    "Markup",
    "bar",
    "breakable",
    "categories_of_row",
    "colour_class",
    "column",
    "copyable",
    "draw_table",
    "el",
    "fact_list",
    "join",
    "scrolling",
    "section",
    "stack_details",
    "swatch",
    "what",
]

# HTML's only: an SVG shape without an end tag would hold every shape that follows.
_VOID = {"br", "col", "hr", "input", "link", "meta", "wbr"}
# Parts of a device that have a colour and are no category.
_OWN_COLOUR = {"training", "cached", "inactive_split", "private_pools", "non_torch", "free", "held", "request"}


class Markup(str):
    """Text that is already markup."""


Child = Union[str, Markup, None, "list[Child]", "tuple[Child, ...]"]


def join(*children: Child) -> Markup:
    """Join children, plain text escaped; ``None`` is nothing."""
    return Markup("".join(_render(child) for child in children))


def _render(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, (list, tuple)):
        return join(*child)
    return escape(child, quote=False)


def el(tag: str, attributes: dict[str, object] | None = None, *children: Child) -> Markup:
    """Make one element; an attribute that is ``None`` or ``False`` is left out, ``True`` has no value."""
    parts = [tag]
    for name, value in (attributes or {}).items():
        if value is True:
            parts.append(name)
        elif value is not None and value is not False:
            parts.append(f'{name}="{escape(str(value), quote=True)}"')
    head = " ".join(parts)
    return Markup(f"<{head}>" if tag in _VOID else f"<{head}>{join(*children)}</{tag}>")


def section(identifier: str, title: str, note: str, *children: Child) -> Markup:
    """Make a titled section; ``note`` stands small beside its title."""
    heading = el("h2", {"id": f"{identifier}-title"}, title, el("small", {}, note) if note else None)
    return el("section", {"id": identifier, "aria-labelledby": f"{identifier}-title"}, heading, *children)


def swatch(identifier: str) -> Markup:
    """Draw a square in a category's colour."""
    return el("i", {"class": f"swatch c-{colour_class(identifier)}", "aria-hidden": "true"})


def colour_class(identifier: str) -> str:
    """Name the CSS class that colours a category, one of the parts of a device, or a published row."""
    return identifier if identifier in _OWN_COLOUR else slug(identifier)


def categories_of_row(level: int, identifier: str, colour: str, parts: Sequence[str]) -> dict[str, object]:
    """Say which categories a row of components is about, for the script that hides them.

    A group is about its ``parts``; one without parts (unattributed, an empty KV cache) about the category of its name.
    """
    if level:
        return {"data-category": colour_class(colour)}
    if parts:
        return {"data-categories": " ".join(colour_class(part) for part in parts)}
    return {"data-category": colour_class(identifier)} if identifier in CATEGORY_WORDS else {}


def bar(parts: Sequence[Part], scale: int, *, labels: bool = False, described: str = "") -> Markup:
    """Draw parts side by side, ``scale`` bytes wide; ``described`` says the same to a screen reader."""
    segments = []
    for part in parts:
        width = 100 * (part.bytes - part.guessed) / scale
        text = el("b", {}, part.label) if labels and width > 1.1 * len(part.label) and part.id != "free" else None
        title = f"{part.label}: {amount(part.bytes)}" + (f", {amount(part.guessed)} guessed" if part.guessed else "")
        kind = f"seg c-{colour_class(part.id)}"
        if part.bytes > part.guessed:
            segments.append(el("span", {"class": kind, "style": f"width:{width:.4f}%", "title": title}, text))
        if part.guessed:
            style = f"width:{100 * part.guessed / scale:.4f}%"
            segments.append(el("span", {"class": f"{kind} guess", "style": style, "title": title}))
    return el("div", {"class": "bar big" if labels else "bar", "role": "img", "aria-label": described}, *segments)


def stack_details(frames: Sequence[str], title: str) -> Markup | None:
    """Fold a stack under ``title``."""
    if not frames:
        return None
    return el("details", {}, el("summary", {}, title), copyable(code="\n".join(frames)))


def copyable(*, code: str) -> Markup:
    """Show lines to paste, with a button that copies them."""
    button = el("button", {"type": "button", "class": "copy needs-js"}, "Copy")
    return el("div", {"class": "copyable"}, el("pre", {"tabindex": "0"}, code), button)


def scrolling(table: Markup, label: str = "") -> Markup:
    """Let a wide table scroll sideways, by keyboard too; ``label`` names it as a region."""
    named = {"role": "region", "aria-label": label} if label else {}
    return el("div", {"class": "scroll", "tabindex": "0", **named}, table)


def column(text: str, numeric: bool = False, extra: str = "") -> Markup:
    """Make a table column's heading."""
    return el(
        "th", {"scope": "col", "class": " ".join(c for c in ("num" if numeric else "", extra) if c) or None}, text
    )


def draw_table(rows: Table | None, label: str = "") -> Markup | None:
    """Draw a table, its first cells as headings of their rows; nothing where there is none."""
    if rows is None:
        return None
    shown = rows.on("p")
    head = [column(c.title, c.right, "wide" if c.wide else "") for c in shown.columns]
    headed = any(c.title for c in shown.columns)
    body = [
        el(
            "tr",
            {"class": "chosen" if line.strong else None},
            *[_cell(cell, shown.columns[i], not i, rows.scale) for i, cell in enumerate(line.cells)],
        )
        for line in shown.lines
    ]
    top = el("thead", {}, el("tr", {}, *head)) if headed else None
    return scrolling(el("table", {"class": shown.kind or None}, top, el("tbody", {}, *body)), label)


def _cell(cell: Cell, above: Column, first: bool, scale: int) -> Markup:
    kind: object = " ".join(name for name, has in (("num", above.right), ("wide", above.wide)) if has) or None
    tag, place = "th" if first else "td", {"scope": "row" if first else None, "class": kind}
    if isinstance(cell, Words):
        return el(tag, place, *_words(cell))
    if isinstance(cell, tuple):
        return el(tag, place, bar(cell, scale, described=", ".join(f"{p.label} {amount(p.bytes)}" for p in cell)))
    return el(tag, place, "–" if cell is None else amount(cell) if isinstance(cell, int) else cell)


def _words(words: Words) -> list[Child]:
    shown: Child = el("span", {"class": words.tone}, words.text) if words.tone not in ("", "code") else words.text
    if words.tone == "code" and words.text != "–":
        shown = el("code", {}, words.text)
    before = swatch(words.category) if words.category else None
    if words.phase:
        before = el("i", {"class": f"swatch p-{slug(words.phase)}", "aria-hidden": "true"})
    badges = [
        el("span", {"class": f"badge {'peak' if badge in _LOUD else ''}".strip()}, badge) for badge in words.badges
    ]
    if words.folded:
        summary = el("summary", {}, breakable(words.text))
        shown = el("details", {"data-open": words.opens}, summary, copyable(code="\n".join(words.folded)))
    return [before, shown, *[(" ", badge) for badge in badges], el("small", {}, words.small) if words.small else None]


# Badges in the colour of the peak.
_LOUD = ("peak", "out of memory")


def fact_list(facts: Sequence[Fact]) -> Markup:
    """List labelled facts, one a line."""
    code = ("Command", "Every allocation")
    pairs = []
    for fact in facts:
        value = copyable(code=fact.value) if fact.label in code else fact.value
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
    """Name a line of allocations: by its own name, else by where it was made."""
    label = allocation.name or allocation.site or allocation.detail or allocation.category_label
    return f"{label} ×{thousands(allocation.count)}" if allocation.count > 1 else label


def breakable(text: str) -> Markup:
    """Let text break after a slash or an underscore: paths stand in narrow columns."""
    return join(*[(part, el("wbr")) if part in ("/", "_") else part for part in re.split(r"([/_])", text)])
