"""Draw the ranks of a distributed run: which holds most, of what, in which phase, on which node."""

from __future__ import annotations

from collections.abc import Sequence

from memprof.reports.document.model import Cell, RankRow, Ranks, RecordingRow
from memprof.reports.document.text import amount, thousands
from memprof.reports.html.elements import Child, Markup, column, el, scrolling, section, swatch
from memprof.reports.palette import slug

__all__ = ["ranks_section", "recordings_section"]

# Up to so many ranks are rows at once; of more the fullest are, and the others open below: a screen shows them all.
_ROWS_AT_ONCE = 32
_FULLEST = 8
_NODES_AT_ONCE = 12
# From so many on a picture of all of them stands above the table.
_PICTURE_FROM = 12
_PICTURE_WIDTH, _LINE = 1200, 16


def ranks_section(ranks: Ranks | None) -> Markup | None:
    """Draw the ranks, the fullest first."""
    if ranks is None:
        return None
    worlds = f"{ranks.count} of {ranks.world_size} ranks" if ranks.count != ranks.world_size else f"{ranks.count} ranks"
    note = f"{worlds}; each rank at its own peak; a stronger colour is more; ▲ is clearly above the median"
    return section(
        "ranks",
        "Ranks",
        note,
        el("p", {}, ranks.sentence, " ", el("a", {"href": "#in-full"}, ranks.in_full)),
        el("p", {"class": "bad"}, ranks.missing) if ranks.missing else None,
        el("ul", {"class": "notes"}, *[el("li", {}, d) for d in ranks.differences]) if ranks.differences else None,
        _picture(ranks) if ranks.count >= _PICTURE_FROM else None,
        _matrix(ranks, ranks.rows[: _at_once(ranks)]),
        _others(ranks),
        el("div", {"class": "columns even"}, _phases(ranks), _nodes(ranks)),
    )


def _at_once(ranks: Ranks) -> int:
    return _ROWS_AT_ONCE if ranks.count <= _ROWS_AT_ONCE else _FULLEST


def _matrix(ranks: Ranks, rows: Sequence[RankRow], heading: str = "") -> Markup:
    nodes = len(ranks.nodes) > 1
    devices = any(r.held_bytes is not None for r in rows)
    head = [column("Rank"), column("Node", extra="wide") if nodes else None, column("Peak in", extra="wide")]
    head += [column("Peak", True), column("Device held", True) if devices else None]
    head += [el("th", {"scope": "col", "class": "num"}, swatch(c) if c else None, label) for c, label in ranks.columns]
    body = [_rank_row(row, nodes, devices) for row in rows]
    table = el("table", {"class": "ranks"}, el("thead", {}, el("tr", {}, *head)), el("tbody", {}, *body))
    return scrolling(table, heading or "Ranks by category")


def _rank_row(row: RankRow, nodes: bool, devices: bool) -> Markup:
    badges: list[Child] = []
    if row.oom:
        badges.append(el("span", {"class": "badge peak"}, "out of memory"))
    if row.shown:
        badges.append(el("span", {"class": "badge"}, "shown"))
    held = "–" if row.held_bytes is None else amount(row.held_bytes)
    return el(
        "tr",
        {},
        el("th", {"scope": "row"}, f"{row.rank} ", *badges),
        el("td", {"class": "wide"}, row.node) if nodes else None,
        el("td", {"class": "wide"}, row.where),
        el("td", {"class": "num"}, el("b", {}, amount(row.peak_bytes))),
        el("td", {"class": "num"}, held) if devices else None,
        *[_cell(cell) for cell in row.cells],
    )


def _cell(cell: Cell) -> Markup:
    mark = "▲ " if cell.above else ""
    return el("td", {"class": f"num heat-{cell.heat}"}, f"{mark}{amount(cell.bytes)}")


def _others(ranks: Ranks) -> Markup | None:
    rest = ranks.rows[_at_once(ranks) :]
    if not rest:
        return None
    summary = el("summary", {}, f"The other {thousands(len(rest))} ranks")
    return el("details", {"class": "more-ranks"}, summary, _matrix(ranks, rest, "The other ranks by category"))


def _picture(ranks: Ranks) -> Markup | None:
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
    svg = el("svg", {"class": "rank-picture", "viewBox": box, "role": "img", "aria-label": words}, *drawn)
    return el("figure", {"class": "ranks-figure"}, svg, el("figcaption", {"class": "caption muted"}, f"{words}."))


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
    return el("rect", {"class": f"fill-{heat}", **place})


def _phases(ranks: Ranks) -> Markup:
    head = [
        column("Phase"),
        column("Highest", True),
        column("Median", True),
        column("Lowest", True),
        column("Above the mean", True),
    ]
    body = [
        el(
            "tr",
            {},
            el("th", {"scope": "row"}, el("i", {"class": f"swatch p-{slug(p.phase)}", "aria-hidden": "true"}), p.label),
            el("td", {"class": "num"}, amount(p.highest_bytes), el("small", {}, f" rank {p.highest_rank}")),
            el("td", {"class": "num"}, amount(p.median_bytes)),
            el("td", {"class": "num"}, amount(p.lowest_bytes), el("small", {}, f" rank {p.lowest_rank}")),
            el("td", {"class": "num"}, f"{100 * p.imbalance:.1f} %"),
        )
        for p in ranks.phases
    ]
    return _small_table("The same phase on every rank", head, body)


def _nodes(ranks: Ranks) -> Markup:
    head = [column("Node"), column("Ranks"), column("Fullest", True), column("Mean", True), column("Together", True)]
    body = [
        el(
            "tr",
            {},
            el("th", {"scope": "row"}, n.node),
            el("td", {}, n.ranks),
            el("td", {"class": "num"}, amount(n.highest_bytes), el("small", {}, f" rank {n.highest_rank}")),
            el("td", {"class": "num"}, amount(n.mean_bytes)),
            el("td", {"class": "num"}, amount(n.total_bytes)),
        )
        for n in ranks.nodes
    ]
    first = _small_table("By node", head, body[:_NODES_AT_ONCE])
    if len(body) <= _NODES_AT_ONCE:
        return first
    rest = len(body) - _NODES_AT_ONCE
    others = _small_table("The other nodes", head, body[_NODES_AT_ONCE:])
    return el("div", {}, first, el("details", {}, el("summary", {}, f"The other {thousands(rest)} nodes"), others))


def _small_table(title: str, head: Sequence[Child], body: Sequence[Child]) -> Markup:
    table = el("table", {"class": "rank-spread"}, el("thead", {}, el("tr", {}, *head)), el("tbody", {}, *body))
    return el("div", {}, el("h3", {}, title), scrolling(table, title))


def recordings_section(rows: Sequence[RecordingRow]) -> Markup | None:
    """List every dump of the folder, those that are shown first; none where all of them are."""
    if not rows:
        return None
    head = [column("Dump"), column("Rank"), column("Role, process"), column("Step, time", extra="wide")]
    head += [column("Peak", True), column("Here")]
    body = [
        el(
            "tr",
            {},
            el(
                "th",
                {"scope": "row"},
                row.file,
                el("span", {"class": "badge peak"}, "out of memory") if row.out_of_memory else None,
            ),
            el("td", {}, row.rank),
            el("td", {}, row.who),
            el("td", {"class": "wide"}, row.when),
            el("td", {"class": "num"}, "–" if row.peak_bytes is None else amount(row.peak_bytes)),
            el("td", {}, el("b", {}, row.because) if row.shown else row.because),
        )
        for row in rows
    ]
    table = el("table", {"class": "ranks"}, el("thead", {}, el("tr", {}, *head)), el("tbody", {}, *body))
    shown = sum(row.shown for row in rows)
    note = f"{len(rows)} in the folder, {shown} shown on this page; the peaks of those that were read"
    return section("recordings", "Dumps in the folder", note, scrolling(table, "Dumps"))
