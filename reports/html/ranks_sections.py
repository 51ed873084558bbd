"""Draw the ranks of a distributed run: which holds most, of what, in which phase, on which node."""

from __future__ import annotations

from collections.abc import Sequence

from memprof.reports.document.blocks import TableBlock
from memprof.reports.document.model import RankCell, RankRow, RanksView
from memprof.reports.document.text import thousands
from memprof.reports.html.elements import Child, Markup, column, draw_table, el, scrolling, section, swatch

from memprof.units import amount

# Up to so many ranks are rows at once; of more the fullest are, and the others open below: a screen shows them all.
_ROWS_AT_ONCE = 32
_FULLEST = 8
_NODES_AT_ONCE = 12
# From so many on a picture of all of them stands above the table.
_PICTURE_FROM = 12
_PICTURE_WIDTH, _LINE = 1200, 16


def ranks_section(ranks: RanksView | None) -> Markup | None:
    """Draw the ranks, the fullest first."""
    if ranks is None:
        return None
    worlds = f"{ranks.count} of {ranks.world_size} ranks" if ranks.count != ranks.world_size else f"{ranks.count} ranks"
    note = f"{worlds}; each rank at its peak; a stronger colour is more; ▲ is clearly above the median"
    return section(
        "ranks",
        f"Ranks: {ranks.finding}" if ranks.finding else "Ranks",
        note,
        el("p", ranks.sentence, " ", el("a", {"href": "#in-full"}, ranks.in_full)),
        el("p.bad", ranks.missing) if ranks.missing else None,
        el("ul.notes", *[el("li", d) for d in ranks.differences]) if ranks.differences else None,
        _picture(ranks) if ranks.count >= _PICTURE_FROM else None,
        _matrix(ranks, ranks.rows[: _at_once(ranks)]),
        _others(ranks),
        el("div.columns even", _titled("The same phase on every rank", ranks.phases), _nodes(ranks.nodes)),
    )


def _at_once(ranks: RanksView) -> int:
    return _ROWS_AT_ONCE if ranks.count <= _ROWS_AT_ONCE else _FULLEST


def _matrix(ranks: RanksView, rows: Sequence[RankRow], heading: str = "") -> Markup:
    nodes = ranks.several_nodes
    devices = any(r.held_bytes is not None for r in rows)
    head = [column("Rank"), column("Node", extra="wide") if nodes else None, column("Peak in", extra="wide")]
    head += [column("Peak", True), column("Device memory in use", True) if devices else None]
    head += [el("th", {"scope": "col", "class": "num"}, swatch(c) if c else None, label) for c, label in ranks.columns]
    body = [_rank_row(row, nodes, devices) for row in rows]
    table = el("table.ranks", el("thead", el("tr", *head)), el("tbody", *body))
    return scrolling(table, heading or "Ranks by category")


def _rank_row(row: RankRow, nodes: bool, devices: bool) -> Markup:
    badges: list[Child] = []
    if row.oom:
        badges.append(el("span.badge peak", "out of memory"))
    if row.shown:
        badges.append(el("span.badge", "shown"))
    held = "–" if row.held_bytes is None else amount(row.held_bytes)
    return el(
        "tr",
        el("th", {"scope": "row"}, f"{row.rank} ", *badges),
        el("td.wide", row.node) if nodes else None,
        el("td.wide", row.where),
        el("td.num", el("b", amount(row.peak_bytes))),
        el("td.num", held) if devices else None,
        *[_cell(cell) for cell in row.cells],
    )


def _cell(cell: RankCell) -> Markup:
    mark = "▲ " if cell.above else ""
    return el(f"td.num heat-{cell.heat}", f"{mark}{amount(cell.bytes)}")


def _others(ranks: RanksView) -> Markup | None:
    rest = ranks.rows[_at_once(ranks) :]
    if not rest:
        return None
    summary = el("summary", f"The other {thousands(len(rest))} ranks")
    return el("details.more-ranks", summary, _matrix(ranks, rest, "The other ranks by category"))


def _picture(ranks: RanksView) -> Markup | None:
    """Draw every rank as a column, in the order of their numbers; neighbours of one shade are drawn as one."""
    rows = {row.rank: row for row in ranks.rows}
    lines = [("Peak", [rows[r].shade if r in rows else 0 for r in range(ranks.world_size)])]
    lines += [
        (label, [rows[r].cells[line].shade if r in rows else 0 for r in range(ranks.world_size)])
        for line, (_, label) in enumerate(ranks.columns)
    ]
    lines = [(label, shades) for label, shades in lines if any(shades)]
    if not lines:
        return None
    step = _PICTURE_WIDTH / ranks.world_size
    drawn: list[Child] = []
    for line, (label, shades) in enumerate(lines):
        drawn += [_stretch(line, first, last, shade, step) for first, last, shade in _stretches(shades)]
        drawn.append(el("text", {"x": "-8", "y": str(line * _LINE + 12), "text-anchor": "end"}, label))
    words = (
        f"Ranks 0 to {ranks.world_size - 1} from left to right; each line on its own scale, pale for the rank that "
        "holds least of it, strong for the one that holds most; categories that hardly differ have no line"
    )
    box = f"-150 0 {_PICTURE_WIDTH + 150} {_LINE * len(lines)}"
    svg = el("svg.rank-picture", {"viewBox": box, "role": "img", "aria-label": words}, *drawn)
    return el("figure.ranks-figure", svg, el("figcaption.caption muted", f"{words}."))


def _stretches(shades: Sequence[int]) -> list[tuple[int, int, int]]:
    """Join neighbours of one shade as ``(first, last, shade)``, without those that have none."""
    found: list[tuple[int, int, int]] = []
    for i, shade in enumerate(shades):
        if found and found[-1][2] == shade and found[-1][1] == i - 1:
            found[-1] = (found[-1][0], i, shade)
        elif shade:
            found.append((i, i, shade))
    return found


def _stretch(line: int, first: int, last: int, heat: int, step: float) -> Markup:
    x, width = first * step, (last - first + 1) * step
    place: dict[str, object] = {"x": f"{x:.1f}", "y": line * _LINE + 1, "width": f"{width:.1f}", "height": _LINE - 2}
    return el(f"rect.fill-{heat}", {**place})


def _nodes(nodes: TableBlock | None) -> Markup | None:
    """List the fullest nodes; the others open below."""
    if nodes is None:
        return None
    first = _titled("By node", nodes.part(0, _NODES_AT_ONCE))
    rest = len(nodes.lines) - _NODES_AT_ONCE
    if rest <= 0:
        return first
    others = _titled("The other nodes", nodes.part(_NODES_AT_ONCE))
    return el("div", first, el("details", el("summary", f"The other {thousands(rest)} nodes"), others))


def _titled(title: str, rows: TableBlock | None) -> Markup | None:
    """Draw a table under its title; nothing where there is none."""
    return None if rows is None else el("div", el("h3", title), draw_table(rows, title))


def recordings_section(dumps: TableBlock | None) -> Markup | None:
    """List every dump of the folder, those that are shown first; none where all of them are."""
    if dumps is None:
        return None
    shown = sum(line.strong for line in dumps.lines)
    note = f"{len(dumps.lines)} in the folder, {shown} shown on this page; the peaks of those that were read"
    return section("recordings", "Dumps in the folder", note, draw_table(dumps, "Dumps"))
