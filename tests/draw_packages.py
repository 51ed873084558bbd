"""Draw the table of packages for the documentation: ``python -m tests.draw_packages``.

Writes ``docs/images/packages.svg`` and the list between the marks in ``docs/architecture.md``. A test compares both
with the table, so that the picture stays current.
"""

from __future__ import annotations

import itertools
from html import escape

from tests.package_rules import PACKAGES, ROOT, SHARED_MODULES

PICTURE = ROOT / "docs" / "images" / "packages.svg"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- packages: python -m tests.draw_packages -->", "<!-- end of packages -->"

_BOX, _HIGH, _ACROSS, _DOWN, _EDGE = 112, 34, 26, 46, 16


def layers() -> list[list[str]]:
    """Packages by the longest way down: a package stands one layer above the highest it imports."""
    height: dict[str, int] = {}
    for package, (_, below) in PACKAGES.items():  # a package comes after all it imports
        height[package] = 1 + max((height[other] for other in below), default=-1)
    return [[package for package in PACKAGES if height[package] == layer] for layer in range(max(height.values()) + 1)]


def direct(package: str) -> list[str]:
    """The packages below that no other import of ``package`` leads to anyway: the arrows worth drawing."""
    below = PACKAGES[package][1]
    return [other for other in below if not any(other in reachable(third) for third in below if third != other)]


def reachable(package: str) -> set[str]:
    """All packages below a package, directly or around corners."""
    found: set[str] = set()
    for other in PACKAGES[package][1]:
        found |= {other} | reachable(other)
    return found


def picture() -> str:
    """The drawing as SVG: the highest layer on top, every arrow pointing down."""
    stacked = layers()
    wide = max(len(layer) for layer in stacked) * (_BOX + _ACROSS) - _ACROSS + 2 * _EDGE
    high = (len(stacked) + 1) * (_HIGH + _DOWN) - _DOWN + 2 * _EDGE
    place: dict[str, tuple[float, float]] = {}
    columns = max(len(layer) for layer in stacked)
    for level, layer in enumerate(stacked):
        for package, column in _columns(layer, place, columns).items():
            place[package] = _EDGE + column * (_BOX + _ACROSS), _EDGE + (len(stacked) - 1 - level) * (_HIGH + _DOWN)
    lines = [_arrow(place[package], place[other]) for package in PACKAGES for other in direct(package)]
    boxes = [_box(*place[package], _BOX, package) for package in PACKAGES]
    ground = _box(_EDGE, high - _EDGE - _HIGH, wide - 2 * _EDGE, "shared modules: " + ", ".join(SHARED_MODULES))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        'font-family="system-ui, sans-serif" font-size="14" role="img" aria-label="Packages and their imports">'
    )
    marker = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#64748b"/></marker></defs>'
    )
    paper = f'<rect width="{wide}" height="{high}" rx="8" fill="#ffffff"/>'
    return "\n".join([head, marker, paper, *lines, *boxes, ground, "</svg>", ""])


def _columns(layer: list[str], place: dict[str, tuple[float, float]], columns: int) -> dict[str, int]:
    """A column for each package of a layer, as near as can be to the middle of what it imports."""
    wanted = {}
    for number, package in enumerate(layer):
        xs = [place[other][0] for other in direct(package)]
        wanted[package] = sum(xs) / len(xs) / (_BOX + _ACROSS) if xs else float(number)
    free = list(itertools.combinations(range(columns), len(layer)))
    order = sorted(layer, key=lambda package: wanted[package])
    best = min(free, key=lambda chosen: sum((wanted[r] - c) ** 2 for r, c in zip(order, chosen, strict=True)))
    return dict(zip(order, best, strict=True))


def _arrow(source: tuple[float, float], target: tuple[float, float]) -> str:
    x, y = source[0] + _BOX / 2, source[1] + _HIGH
    to_x, to_y = target[0] + _BOX / 2, target[1]
    if to_y - y > _DOWN:  # past other layers: down the gap beside the package, on the target's side
        side = -1 if to_x < x else 1
        lane, above = x + side * (_BOX + _ACROSS) / 2, to_y - _DOWN / 2
        path = f"M{x + side * _BOX / 2:g} {y - _HIGH / 2:g} H{lane:g} V{above:g} H{to_x + side * 8:g} V{to_y:g}"
    else:
        path = f"M{x:g} {y:g} C{x:g} {y + _DOWN / 2:g} {to_x:g} {to_y - _DOWN / 2:g} {to_x:g} {to_y:g}"
    return f'<path d="{path}" fill="none" stroke="#94a3b8" stroke-width="1.2" marker-end="url(#tip)"/>'


def _box(x: float, y: float, width: float, text: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{_HIGH}" rx="6" fill="#eef2ff" stroke="#4f46e5"/>'
        f'<text x="{x + width / 2:g}" y="{y + 22:g}" text-anchor="middle" fill="#1e1b4b">{escape(text)}</text>'
    )


def listing() -> str:
    """The packages as Markdown, the highest first."""
    return "\n".join(f"- `{package}`: {what}" for package, (what, _) in reversed(PACKAGES.items()))


def page_with_listing(text: str) -> str:
    """The page, with the list between its marks made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{listing()}\n{END}{after}"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    PAGE.write_text(page_with_listing(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
