"""Draw what grew and what shrank between two runs, by category and call site, as nested boxes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from memprof.reports.document.model import Document, Node
from memprof.reports.document.tables import SMALLEST_BOX
from memprof.reports.html.elements import Child, Markup, colour_class, el, join, section, swatch

from memprof.units import amount

# Line numbers differ between versions of a program.
_LINE = re.compile(r":\d+(?= |$)")


class Changed(NamedTuple):
    """A box: bytes at the one peak and at the other; ``grown`` and ``shrunk`` add up the boxes below it."""

    label: str
    category: str
    before: int
    after: int
    grown: int
    shrunk: int
    children: tuple[Changed, ...] = ()

    @property
    def net(self) -> int:
        return self.after - self.before

    @property
    def gross(self) -> int:
        """What the box is as wide as."""
        return self.grown + self.shrunk


def difference_of(first: Node, other: Node) -> Changed:
    """Merge two icicles: boxes of one category, file and function belong together, whatever their lines."""
    return _merged([first], [other], "Difference", "")


def _merged(first: Sequence[Node], other: Sequence[Node], label: str, category: str) -> Changed:
    before, after = sum(node.bytes for node in first), sum(node.bytes for node in other)
    inner = (_inner(first), _inner(other))
    keys = dict.fromkeys(_key(node) for nodes in inner for node in nodes)
    children = []
    for key in keys:
        ours, theirs = ([node for node in nodes if _key(node) == key] for nodes in inner)
        name = _with_lines(ours, theirs)
        children.append(_merged(ours, theirs, name, key[0]))
    if children:
        grown, shrunk = sum(child.grown for child in children), sum(child.shrunk for child in children)
    else:
        grown, shrunk = max(after - before, 0), max(before - after, 0)
    changed = sorted((child for child in children if child.gross), key=lambda child: -child.gross)
    return Changed(label, category, before, after, grown, shrunk, tuple(changed))


# So many lines of one function are named.
_LINES = 3


def _with_lines(ours: Sequence[Node], theirs: Sequence[Node]) -> str:
    """Label boxes that belong together with their lines: ``train.py:12 f``, or ``train.py:12→14 f`` if they differ."""
    numbers = [_lines(nodes) for nodes in (ours, theirs)]
    # Runs that share a line ran the same file.
    if not all(numbers) or numbers[0] & numbers[1]:
        numbers = [numbers[0] | numbers[1]] * 2
    before, after = map(_line_words, numbers)
    return _LINE.sub(f":{before}" if before == after else f":{before}→{after}", [*ours, *theirs][0].label, count=1)


def _lines(nodes: Sequence[Node]) -> set[int]:
    return {int(line[1:]) for node in nodes for line in _LINE.findall(node.label)}


def _line_words(numbers: set[int]) -> str:
    return ",".join(map(str, sorted(numbers)[:_LINES])) + (",…" if len(numbers) > _LINES else "")


def _inner(nodes: Iterable[Node]) -> list[Node]:
    """List the boxes below, without those of single tensors."""
    return [child for node in nodes for child in node.children if child.allocation is None]


def _key(node: Node) -> tuple[str, str]:
    return node.category, _LINE.sub("", node.label)


def difference_section(runs: Sequence[tuple[str, Document]]) -> Markup | None:
    """Draw each run's difference to the first; nothing where there is one run only, or none."""
    if len(runs) < 2:
        return None
    (first_label, first), *others = runs
    drawn = [(label, difference_of(first.icicle, other.icicle)) for label, other in others]
    shown = [(f"{first_label} → {label}", found) for label, found in drawn if found.gross]
    if not shown:
        return None
    (title, found), *rest = shown
    more = [
        el("details", el("summary", f"{name}: {signed(other.net)}"), el("div.icicle", _node(other, other, 0, False)))
        for name, other in rest
    ]
    note = "red with +: grown; blue with −: shrunk; a box is as wide as all that changed in it"
    root = el(
        "div.icicle",
        {"id": "icicle-root", "role": "group", "aria-label": "Difference by call site; arrow keys move"},
        _node(found, found, 0, True),
    )
    return section("difference", "Grown and shrunk", note, el("p", title, ": ", _sentence(found)), root, *more)


def signed(n_bytes: int) -> str:
    """Write a difference with its sign (a true minus) and unit."""
    if not n_bytes:
        return "±0"
    return f"{'+' if n_bytes > 0 else '−'}{amount(abs(n_bytes))}"


def _sentence(found: Changed) -> str:
    same = min(found.before, found.after) - (found.shrunk if found.net >= 0 else found.grown)
    words = f"{signed(found.grown)} and {signed(-found.shrunk)}, in all {signed(found.net)}."
    return f"{words} {amount(same)} did not change." if same > 0 else words


def _node(node: Changed, root: Changed, depth: int, pressed: bool) -> Markup:
    large = [child for child in node.children if child.gross * SMALLEST_BOX >= root.gross]
    children = [_node(child, root, depth + 1, pressed) for child in large]
    small = [child for child in node.children if child.gross * SMALLEST_BOX < root.gross]
    if small:
        rest = Changed(
            "smaller ones", node.category, sum(c.before for c in small), sum(c.after for c in small),
            sum(c.grown for c in small), sum(c.shrunk for c in small),
        )  # fmt: skip
        children.append(_node(rest, root, depth + 1, pressed))
    # Of mixed boxes the colour is paler: three strengths.
    strength = 1 + round(2 * abs(node.net) / node.gross) if node.gross else 1
    tone = "root" if depth == 0 else f"{'grown-box' if node.net >= 0 else 'shrunk-box'} s{strength}"
    both = f"; grown {amount(node.grown)}, shrunk {amount(node.shrunk)}" if node.grown and node.shrunk else ""
    words = f"{node.label}, {signed(node.net)}: {amount(node.before)} before, {amount(node.after)} after{both}"
    shorter = re.sub(r"^.*/", "", node.label)
    square = swatch(node.category) if depth == 1 else None
    label: Child = el("span.label", {"data-shorter": shorter if shorter != node.label else None}, node.label)
    inside = join(square, label, el("b", signed(node.net)))
    attributes: dict[str, object] = {"class": f"box {tone}", "title": words, "data-bytes": str(node.gross)}
    box = el("button", {"type": "button", **attributes}, inside) if pressed else el("div", attributes, inside)
    category = colour_class(node.category) if depth == 1 else None
    style = f"flex:{100 * node.gross / (root.gross or 1):.3f} 1 0"
    parent: dict[str, object] = {"style": style, "data-category": category}
    return el(f"div.node d{depth}", parent, box, el("div.kids", *children) if children else None)
