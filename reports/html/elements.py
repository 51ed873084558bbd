"""Make elements with everything escaped: the only way text gets into a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Union

from memprof.reports.document.blocks import BarPart, Cell, Column, Curve, Fact, Figure, TableBlock, TableRow, TextCell
from memprof.reports.document.model import AllocationRow
from memprof.reports.document.text import CATEGORY_WORDS, plain, thousands
from memprof.reports.palette import LOOKS, slug

from memprof.analysis.allocations.places import is_native
from memprof.units import amount

# HTML's only: an SVG shape without an end tag would hold every shape that follows.
_VOID = {"br", "col", "hr", "input", "link", "meta", "wbr"}


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
    return _escaped(child)


def _escaped(text: str, quote: bool = False) -> str:
    """Return text that is no markup and prints as it is; lines to paste keep their breaks."""
    return escape(plain(text, keep="\n\t"), quote=quote)


def el(tag: str, first: Child | dict[str, object] = None, *children: Child) -> Markup:
    """Make one element: ``el("p.muted", words)``; a dictionary of attributes may come before the children.

    An attribute that is ``None`` or ``False`` is left out, ``True`` has no value.
    """
    name, _, kind = tag.partition(".")
    named: dict[str, object] = {"class": kind} if kind else {}
    parts = [name]
    for attribute, value in {**named, **(first if isinstance(first, dict) else {})}.items():
        if value is True:
            parts.append(attribute)
        elif value is not None and value is not False:
            parts.append(f'{attribute}="{_escaped(str(value), quote=True)}"')
    head, inner = " ".join(parts), join(None if isinstance(first, dict) else first, *children)
    return Markup(f"<{head}>" if name in _VOID else f"<{head}>{inner}</{name}>")


def section(identifier: str, title: str, note: str, *children: Child) -> Markup:
    """Make a titled section; ``note`` stands small beside its title."""
    heading = el("h2", {"id": f"{identifier}-title"}, title, el("small", note) if note else None)
    return el("section", {"id": identifier, "aria-labelledby": f"{identifier}-title"}, heading, *children)


def swatch(identifier: str, inferred: bool = False) -> Markup:
    """Draw a square in a category's colour, hatched if the category is inferred."""
    return el(f"i.swatch c-{colour_class(identifier)}{' guess' if inferred else ''}", {"aria-hidden": "true"})


def colour_class(identifier: str) -> str:
    """Name the CSS class that colours a category, one of the parts of a device, or a published row."""
    return identifier if identifier in LOOKS["part"] else slug(identifier)


def bar(parts: Sequence[BarPart], scale: int, *, labels: bool = False, described: str = "") -> Markup:
    """Draw parts side by side, ``scale`` bytes wide; a screen reader is told their sizes, after ``described``."""
    described += ", ".join(f"{p.label} {amount(p.bytes)}" for p in parts)
    segments = []
    for part in parts:
        known, guessed = part.bytes - part.guessed, part.guessed
        width = 100 * max(known, guessed) / scale
        # A letter is about 0.6% of the bar on a screen of usual width; narrower ones cut a name with an ellipsis.
        text = el("b", part.label) if labels and width > 1.7 + 0.6 * len(part.label) and part.id != "free" else None
        title = f"{part.label}: {amount(part.bytes)}" + (f", {amount(part.guessed)} inferred" if part.guessed else "")
        kind = f"seg c-{colour_class(part.id)}"
        for n_bytes, mark, name in ((known, "", text if known >= guessed else None),
                                    (guessed, " guess", text if known < guessed else None)):  # fmt: skip
            if n_bytes:
                style = f"width:{100 * n_bytes / scale:.4f}%"
                segments.append(el("span", {"class": kind + mark, "style": style, "title": title}, name))
    return el("div", {"class": "bar big" if labels else "bar", "role": "img", "aria-label": described}, *segments)


def legend(parts: Iterable[BarPart], figures: bool = False) -> Markup:
    """Say what the colours are; those of categories can be hidden, where no ``figures`` stand with them."""
    entries = [
        el("li", swatch(p.id), p.label, " ", amount(p.bytes)) if figures else
        el("li", {"data-category": colour_class(p.id)}, swatch(p.id), p.label)
        for p in parts
    ]  # fmt: skip
    return el("ul.legend", *entries)


def notes_section(notes: Sequence[str], title: str = "Notes") -> Markup | None:
    """List sentences; nothing where there are none."""
    items = [el("li", note) for note in notes]
    return section("notes", title, "", el("ul.notes", *items)) if items else None


def stack_details(frames: Sequence[str], title: str) -> Markup | None:
    """Fold a stack under ``title``."""
    if not frames:
        return None
    return el("details", el("summary", title), copyable(code="\n".join(frames)))


def folded_stack(frames: Sequence[str]) -> list[Markup | None]:
    """Show a stack's Python frames, and below them the native ones, folded."""
    native = [is_native(frame) or frame.startswith("…") for frame in frames]
    python = [frame for frame, mark in zip(frames, native, strict=True) if not mark]
    if not python or len(python) == len(frames):
        return [copyable(code="\n".join(frames))]
    whole: list[Child] = []
    for i, (frame, mark) in enumerate(zip(frames, native, strict=True)):
        whole += ["\n" if i else "", el("span.native", frame) if mark else frame]
    rest = el("details.rest", el("summary", "With native frames"), el("pre.whole", {"tabindex": "0"}, *whole))
    return [copyable(code="\n".join(python)), rest]


def copyable(*, code: str) -> Markup:
    """Show lines to paste, with a button that copies them."""
    button = el("button", {"type": "button", "class": "copy needs-js"}, "Copy")
    return el("div.copyable", el("pre", {"tabindex": "0"}, code), button)


def scrolling(table: Markup, label: str = "") -> Markup:
    """Let a wide table scroll sideways, by keyboard too; ``label`` names it as a region."""
    named = {"role": "region", "aria-label": label} if label else {}
    return el("div.scroll", {"tabindex": "0", **named}, table)


def column(text: str, numeric: bool = False, extra: str = "", sums: bool = False) -> Markup:
    """Make a table column's heading; the page sums the column's bytes if it ``sums``."""
    kind = " ".join(c for c in ("num" if numeric else "", extra) if c) or None
    return el("th", {"scope": "col", "class": kind, "data-sums": sums}, text)


def draw_table(rows: TableBlock | None, label: str = "") -> Markup | None:
    """Draw a table, its first cells as headings of their rows; nothing where there is none."""
    if rows is None:
        return None
    shown = rows.seen("p")
    n_runs = sum(column.named for column in shown.columns)
    head = [_heading(above, n_runs) for above in shown.columns]
    body = [_line(line, shown) for line in shown.lines]
    top = el("thead", el("tr", *head)) if any(c.title for c in shown.columns) else None
    return scrolling(el("table", {"class": shown.kind or None}, top, el("tbody", *body)), label)


# Columns that matter less are left out of narrow screens.
_WIDE_RANK = 5


def _kind(above: Column) -> str:
    wide = above.wide or above.rank >= _WIDE_RANK
    return " ".join(name for name, has in (("num", above.right), ("wide", wide)) if has)


def _heading(above: Column, n_runs: int) -> Markup:
    if not above.named:
        kind = f"{_kind(above).removeprefix('num')} {_word(above)}".strip()
        return column(above.page or above.title, above.right, kind, above.sums)
    # A share in a calculation counts for nothing in a table's columns, so it is written out: bars must compare.
    attributes: dict[str, object] = {"scope": "col", "class": "figure", "style": f"width:{40 / n_runs:.2f}%"}
    return el("th", attributes, above.title, " ", el(f"span.badge {above.note}", above.note))


def _word(above: Column) -> str:
    """Name a column that the page's styles treat in their own way."""
    return above.title.lower() if above.title in ("Difference", "Change") else ""


def _line(line: TableRow, rows: TableBlock) -> Markup:
    """Draw a row; one of rows within rows says where it belongs and which categories it is about, for the scripts."""
    path = line.path
    attributes: dict[str, object] = {"class": line.kind or ("chosen" if line.strong else None)}
    if path:
        level, own = len(path) - 1, path[1] if len(path) > 1 else path[0]
        attributes = {"class": f"level{level} {line.kind}".strip(), "data-path": "/".join(path)}
        attributes["data-parent"] = "/".join(path[:-1]) or None
        if not level and line.parts:
            attributes["data-categories"] = " ".join(colour_class(part) for part in line.parts)
        elif level or own in CATEGORY_WORDS:
            attributes["data-category"] = colour_class(own)
    return el("tr", attributes, *[_cell(cell, line, i, rows) for i, cell in enumerate(line.cells)])


def _cell(cell: Cell, line: TableRow, place: int, rows: TableBlock) -> Markup:
    above = rows.columns[place]
    kind: dict[str, object] = {"class": f"{_kind(above)} {_word(above)}".strip() or None}
    tag = "td" if place else "th"
    kind = kind if place else {"scope": "row", **kind, "title": line.hint or None}
    if isinstance(cell, TextCell):
        return el(tag, {**kind, "data-bytes": None if cell.bytes is None else str(cell.bytes)}, *_words(cell))
    if isinstance(cell, Figure):
        return _figure(cell, rows)
    if isinstance(cell, tuple) and line.path:
        return el(tag, {"class": f"{_kind(above)} fills".strip()}, _thin_bar(cell, rows.scale))
    if isinstance(cell, tuple):
        return el(tag, kind, bar(cell, rows.scale))
    if isinstance(cell, Curve):
        return el(tag, kind)
    if isinstance(cell, int):
        return el(tag, {**kind, "data-bytes": str(cell)}, amount(cell))
    return el(tag, kind, "–" if cell is None else cell)


def _figure(figure: Figure, rows: TableBlock) -> Markup:
    """Draw a figure with its bar, the card's end in it where it is capped, and small words below."""
    shown = "–" if figure.bytes is None else amount(figure.bytes)
    cap = cap_mark(rows.capacity, rows.scale) if figure.capped and figure.bytes is not None else None
    small = el("small", figure.small) if figure.small else None
    number = el("span.num", shown)
    exact = None if figure.bytes is None else str(figure.bytes)
    return el("td.figure", {"data-bytes": exact}, number, _thin_bar(figure.parts, rows.scale, "capped", cap), small)


def cap_mark(capacity: int | None, scale: int) -> Markup | None:
    """Mark where the device ends; nothing where that is beyond the scale."""
    if not capacity or capacity > scale:
        return None
    style = f"left:{100 * capacity / scale:.3f}%"
    return el("i.cap", {"style": style, "title": f"{amount(capacity)}, the device", "aria-hidden": "true"})


def _thin_bar(parts: Sequence[BarPart], scale: int, kind: str = "", cap: Markup | None = None) -> Markup:
    """Draw a bar beside its figure, which says what it shows."""
    segments = [
        el(f"span.seg c-{colour_class(part.id)}{mark}", {"style": f"width:{100 * share / scale:.4f}%"})
        for part in parts
        for share, mark in ((part.bytes - part.guessed, ""), (part.guessed, " guess"))
        if share
    ]
    return el("div", {"class": f"bar thin {kind}".strip()}, *segments, cap)


def _words(words: TextCell) -> list[Child]:
    shown: Child = words.text
    if words.tone == "code" and words.text != "–":
        shown = el("code", words.text)
    elif words.tone not in ("", "code", "strong"):
        shown = el("span", {"class": words.tone}, words.text)
    before = swatch(words.category) if words.category else None
    if words.phase:
        before = el(f"i.swatch p-{slug(words.phase)}", {"aria-hidden": "true"})
    badges = [
        el("span", {"class": f"badge {'peak' if badge in _LOUD else ''}".strip()}, badge) for badge in words.badges
    ]
    if words.folded:
        summary = el("summary", breakable(words.text))
        shown = el("details", {"data-open": words.opens}, summary, *folded_stack(words.folded))
    return [before, shown, *[(" ", badge) for badge in badges], el("small", words.small) if words.small else None]


# Badges in the colour of the peak.
_LOUD = ("peak", "out of memory")


def fact_list(facts: Sequence[Fact]) -> Markup:
    """List labelled facts, one a line."""
    code = ("Command", "Every allocation")
    pairs = []
    for fact in facts:
        value = copyable(code=fact.value) if fact.label in code else fact.value
        pairs.append(el("div", el("dt.muted", fact.label), el("dd", value, " ", el("span.muted", fact.note))))
    return el("dl.pairs", *pairs)


def what(allocation: AllocationRow) -> str:
    """Name a line of allocations: by its own name, else by where it was made."""
    label = allocation.name or allocation.site or allocation.detail or allocation.label
    return f"{label} ×{thousands(allocation.count)}" if allocation.count > 1 else label


def breakable(text: str) -> Markup:
    """Let text break after a slash or an underscore: paths stand in narrow columns."""
    return join(*[(part, el("wbr")) if part in ("/", "_") else part for part in re.split(r"([/_])", text)])
