"""Draw the table of rooms for the documentation: ``python -m tests.draw_rooms``.

Writes ``docs/images/rooms.svg`` and the list between the marks in ``docs/architecture.md``. A test compares both with
the table, so that the map is never older than the walls.
"""

from __future__ import annotations

import itertools
from html import escape

from tests.rooms import FIRST_FLOOR, ROOMS, ROOT

PICTURE = ROOT / "docs" / "images" / "rooms.svg"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms: python -m tests.draw_rooms -->", "<!-- end of rooms -->"

_BOX, _HIGH, _ACROSS, _DOWN, _EDGE = 112, 34, 26, 46, 16


def floors() -> list[list[str]]:
    """Rooms by the longest way down: a room stands one floor above the highest it imports."""
    height: dict[str, int] = {}
    for room, (_, below) in ROOMS.items():  # a room comes after all it imports
        height[room] = 1 + max((height[other] for other in below), default=-1)
    return [[room for room in ROOMS if height[room] == floor] for floor in range(max(height.values()) + 1)]


def direct(room: str) -> list[str]:
    """The rooms below that no other import of ``room`` leads to anyway: the arrows worth drawing."""
    below = ROOMS[room][1]
    return [other for other in below if not any(other in reachable(third) for third in below if third != other)]


def reachable(room: str) -> set[str]:
    """All rooms below a room, directly or around corners."""
    found: set[str] = set()
    for other in ROOMS[room][1]:
        found |= {other} | reachable(other)
    return found


def picture() -> str:
    """The drawing as SVG: the highest floor on top, every arrow pointing down."""
    stacked = floors()
    wide = max(len(floor) for floor in stacked) * (_BOX + _ACROSS) - _ACROSS + 2 * _EDGE
    high = (len(stacked) + 1) * (_HIGH + _DOWN) - _DOWN + 2 * _EDGE
    place: dict[str, tuple[float, float]] = {}
    columns = max(len(floor) for floor in stacked)
    for level, floor in enumerate(stacked):
        for room, column in _columns(floor, place, columns).items():
            place[room] = _EDGE + column * (_BOX + _ACROSS), _EDGE + (len(stacked) - 1 - level) * (_HIGH + _DOWN)
    lines = [_arrow(place[room], place[other]) for room in ROOMS for other in direct(room)]
    boxes = [_box(*place[room], _BOX, room) for room in ROOMS]
    ground = _box(_EDGE, high - _EDGE - _HIGH, wide - 2 * _EDGE, "first floor: " + ", ".join(FIRST_FLOOR))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        'font-family="system-ui, sans-serif" font-size="14" role="img" aria-label="Rooms and their imports">'
    )
    marker = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#64748b"/></marker></defs>'
    )
    paper = f'<rect width="{wide}" height="{high}" rx="8" fill="#ffffff"/>'
    return "\n".join([head, marker, paper, *lines, *boxes, ground, "</svg>", ""])


def _columns(floor: list[str], place: dict[str, tuple[float, float]], columns: int) -> dict[str, int]:
    """A column for each room of a floor, as near as can be to the middle of what it imports."""
    wanted = {}
    for number, room in enumerate(floor):
        xs = [place[other][0] for other in direct(room)]
        wanted[room] = sum(xs) / len(xs) / (_BOX + _ACROSS) if xs else float(number)
    free = list(itertools.combinations(range(columns), len(floor)))
    order = sorted(floor, key=lambda room: wanted[room])
    best = min(free, key=lambda chosen: sum((wanted[r] - c) ** 2 for r, c in zip(order, chosen, strict=True)))
    return dict(zip(order, best, strict=True))


def _arrow(source: tuple[float, float], target: tuple[float, float]) -> str:
    x, y = source[0] + _BOX / 2, source[1] + _HIGH
    to_x, to_y = target[0] + _BOX / 2, target[1]
    if to_y - y > _DOWN:  # past other floors: down the gap beside the room, on the target's side
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
    """The rooms as Markdown, the highest first."""
    return "\n".join(f"- `{room}`: {what}" for room, (what, _) in reversed(ROOMS.items()))


def page_with_listing(text: str) -> str:
    """The page, with the list between its marks made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{listing()}\n{END}{after}"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    PAGE.write_text(page_with_listing(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
