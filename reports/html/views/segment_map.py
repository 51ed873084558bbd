"""Draw the map of segments: a static picture and a table, and for the page's script the other moments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from memprof.reports.document.blocks import Column, TableBlock, TableRow, table
from memprof.reports.document.text import phase_label, sentence_list, thousands
from memprof.reports.html.elements import Markup, colour_class, draw_table, el, join, section
from numpy.typing import NDArray

from memprof.analysis.allocations.segment_map import SegmentMap
from memprof.units import amount
from memprof.vocabulary import CATEGORY_LABELS, Category

I64 = NDArray[np.int64]

_CATEGORIES = list(Category)
# What is no category: a free part of a segment, and a segment without blocks.
_FREE, _EMPTY = 254, 255
# The picture, in pixels: rows of segments, each below its label.
_WIDTH, _LEFT, _ROW, _BAR = 760, 8, 34, 16
# The space between blocks that are wide enough to be seen one by one.
_SEPARATED = 0.7
# Reserved memory fills about so many rows.
_ROWS = 20
# Rectangles of all moments together; where there would be more, small neighbours are merged further.
_MOST_RECTANGLES = 9000


class SegmentRow(msgspec.Struct, frozen=True, array_like=True):
    """A row of segments side by side, as the script reads it.

    ``segments`` are ``(place, bytes, address)`` each: the place is where it begins in the row, in bytes.
    """

    label: str
    note: str
    segments: tuple[tuple[int, int, int], ...]


class MapDrawing(msgspec.Struct, frozen=True, kw_only=True):
    """A map as the script draws it.

    ``rectangles`` are ``row, place, bytes, colour, count``, one after another: places and sizes in bytes of the row,
    ``colour`` an index of ``colours``, ``count`` the number of blocks or free pieces that it stands for.
    """

    title: str
    words: str
    instant: int
    scale: int
    rows: tuple[SegmentRow, ...]
    colours: tuple[str, ...]
    labels: tuple[str, ...]
    rectangles: tuple[int, ...]


def segment_section(maps: Sequence[SegmentMap], drawings: Sequence[MapDrawing]) -> Markup | None:
    """Draw the segments at the peak, or of the dump, and list the figures of every moment."""
    if not maps:
        return None
    first = shown_first(maps)
    drawing = drawings[first]
    buttons = [
        el(
            "button",
            {"type": "button", "data-map": str(i), "aria-pressed": "true" if i == first else "false"},
            moment_words(each.moments),
        )
        for i, each in enumerate(maps)
    ]
    pools = [
        el("div", {"data-pools": str(i), "hidden": i != first}, draw_table(pools_table(each), "Pools"))
        for i, each in enumerate(maps)
    ]
    choice = el("div.tools needs-js", el("span.group", {"role": "group", "aria-label": "Moment"}, *buttons))
    picture = el("figure.segments", {"id": "segment-map", "data-picture": "segments"}, segments_svg(drawing))
    about = el("p.muted fine", {"id": "segment-about", "role": "status"}, _KEY)
    return section(
        "segments",
        "Segments",
        "blocks by category in the allocator's segments; hatched: idle",
        choice if len(maps) > 1 else None,
        el("p", {"id": "segment-words"}, drawing.words),
        picture,
        about,
        *pools,
        draw_table(figures_table(maps)),
        *[el("p.muted fine", words) for words in _caveats(maps)],
    )


_KEY = (
    "Each row is a segment, or several small ones side by side, on one scale. What is narrower than a pixel is drawn "
    "with its neighbours, in the colour of most of them. Point at a block for its address."
)


def shown_first(maps: Sequence[SegmentMap]) -> int:
    """Return the place of the map that is drawn first: the peak's, else the last."""
    return next((i for i, each in enumerate(maps) if "peak" in each.moments), len(maps) - 1)


def map_drawings(maps: Sequence[SegmentMap]) -> tuple[MapDrawing, ...]:
    """Return the drawing of every moment, for the picture and the script."""
    return tuple(map_drawing(each, _MOST_RECTANGLES // len(maps)) for each in maps)


_MOMENTS = {
    "peak": "allocated peak", "device-peak": "device peak", "oom": "out of memory", "end": "end", "dump": "dump",
}  # fmt: skip


def moment_words(moments: Sequence[str]) -> str:
    """Name a moment: ``Allocated peak, peak of backward``."""
    words = [_MOMENTS.get(m) or f"peak of {phase_label(m.removeprefix('phase:')).lower()}" for m in moments]
    joined = ", ".join(words)
    return joined[:1].upper() + joined[1:]


def figures_table(maps: Sequence[SegmentMap]) -> TableBlock | None:
    """List the figures of every moment; the parts of what is idle add up to reserved minus allocated memory."""
    pools, unmapped = any(m.pools for m in maps), any(m.unmapped_bytes for m in maps)
    pending = any(m.pending_free_bytes for m in maps)
    columns = [
        Column("Moment"), Column("Reserved", right=True), Column("Allocated", right=True),
        Column("Idle in whole segments", right=True), Column("Idle within segments", right=True),
        *([Column("Idle in private pools", right=True)] if pools else []),
        *([Column("Waiting for a stream", right=True)] if pending else []),
        Column("Largest free block", right=True, wide=True),
        *([Column("Unmapped gaps", right=True, wide=True)] if unmapped else []),
    ]  # fmt: skip
    lines = []
    for each in maps:
        cells: list[str | int] = [
            moment_words(each.moments), each.reserved_bytes, each.allocated_bytes, each.idle.cached,
            each.idle.inactive_split,
        ]  # fmt: skip
        cells += [each.idle.private_pools] if pools else []
        cells += [each.pending_free_bytes] if pending else []
        cells += [each.largest_free_bytes, *([each.unmapped_bytes] if unmapped else [])]
        lines.append(TableRow(tuple(cells)))
    return table(columns, lines, "")


def pools_table(found: SegmentMap) -> TableBlock | None:
    """List what lies idle in each pool and stream at a moment."""
    layout = found.layout
    lines = []
    for pool, stream, expandable in _kinds(found):
        mine = (layout.pool == pool) & (layout.stream == stream) & ((layout.page > 0) == expandable)
        unused = mine & (layout.used == 0)
        pieces = layout.free_size[mine[layout.free_segment]]
        whole = int(layout.size[unused].sum())
        lines.append(TableRow((
            _kind_words(found, pool, stream, expandable), thousands(int(mine.sum())), int(layout.size[mine].sum()),
            whole, int(layout.idle[mine].sum()) - whole, int(pieces.max(initial=0)),
        )))  # fmt: skip
    columns = (
        Column("Pool"), Column("Segments", right=True, wide=True), Column("Size", right=True, sums=True),
        Column("Idle in whole segments", right=True, sums=True),
        Column("Idle within segments", right=True, sums=True), Column("Largest free block", right=True, wide=True),
    )  # fmt: skip
    return table(columns, lines, "")


def figures_words(found: SegmentMap) -> str:
    """Say in a sentence how much of the reserved memory lies idle, and where."""
    idle = found.idle
    words = (
        f"{moment_words(found.moments)}: {amount(found.reserved_bytes)} reserved in "
        f"{thousands(len(found.layout))} segments, {amount(found.allocated_bytes)} allocated. "
        f"Idle: {amount(idle.cached)} in whole segments, {amount(idle.inactive_split)} within segments"
    )
    words += f", {amount(idle.private_pools)} in private pools" if found.pools else ""
    words += f"; the largest free block is {amount(found.largest_free_bytes)}."
    if found.pending_free_bytes:
        words += f" {amount(found.pending_free_bytes)} are freed and wait for a stream."
    if found.pools:
        each = [f"{amount(p.free_bytes)} of {amount(p.bytes)} in {p.identifier}" for p in found.pools]
        words += f" Only CUDA graphs or an engine can use the private pools: {sentence_list(each)} are idle."
    if found.unmapped_bytes:
        words += f" {amount(found.unmapped_bytes)} of address space between mapped pages use no memory."
    return words


def _caveats(maps: Sequence[SegmentMap]) -> list[str]:
    """Say what the maps do not show."""
    words = []
    if missing := [m for m in maps if m.not_mapped_bytes > 0]:
        most = max(missing, key=lambda m: m.not_mapped_bytes)
        words.append(
            f"{moment_words(most.moments)}: {amount(most.not_mapped_bytes)} of reserved memory are not drawn, because "
            "the recording does not show their segments."
        )
    if outside := [m for m in maps if m.outside_bytes > 0]:
        most = max(outside, key=lambda m: m.outside_bytes)
        words.append(
            f"{moment_words(most.moments)}: {amount(most.outside_bytes)} of blocks are not drawn, because they lie in "
            "no known segment."
        )
    if unseen := [m for m in maps if m.not_in_history_bytes]:
        words.append(
            f"{moment_words(unseen[0].moments)}: {amount(unseen[0].not_in_history_bytes)} are allocated at places that "
            "the history does not show; the drawing has them as idle."
        )
    return words


# ---- rows and rectangles ---------------------------------------------------------------------------------------------


def map_drawing(found: SegmentMap, most: int) -> MapDrawing:
    """Lay a map's segments out in rows, and merge what is narrower than a pixel."""
    layout = found.layout
    scale = max(int(layout.size.max(initial=1)), found.reserved_bytes // _ROWS, 1)
    rows, row_of, place_of = _rows(found, scale)
    address = np.concatenate([found.block_address, layout.free_address])
    segment = np.concatenate([layout.segment, layout.free_segment])
    empty = np.where(layout.used[layout.free_segment] == 0, _EMPTY, _FREE)
    colour = np.concatenate([found.category.astype(np.int64), empty])
    pieces = _Pieces(
        row=row_of[segment],
        place=place_of[segment] + address - layout.address[segment],
        size=np.concatenate([found.block_size, layout.free_size]),
        colour=colour,
        number=np.ones(len(address), np.int64),
    )
    pieces, pixel = pieces.sorted(), max(scale // _WIDTH, 1)
    merged = pieces.merged(pixel)
    while len(merged.row) > most and pixel < scale:
        pixel *= 2
        merged = pieces.merged(pixel)
    used = sorted(set(merged.colour.tolist()))
    table_of = np.zeros(256, np.int64)
    table_of[used] = np.arange(len(used))
    columns = (merged.row, merged.place, merged.size, table_of[merged.colour], merged.number)
    return MapDrawing(
        title=moment_words(found.moments),
        words=figures_words(found),
        instant=found.instant,
        scale=scale,
        rows=rows,
        colours=tuple(_colour(code) for code in used),
        labels=tuple(_label(code) for code in used),
        rectangles=tuple(np.stack(columns, axis=1).reshape(-1).tolist()),
    )


def _colour(code: int) -> str:
    names = {_FREE: "inactive_split", _EMPTY: "cached"}
    return names.get(code) or colour_class(_CATEGORIES[code])


def _label(code: int) -> str:
    names = {_FREE: "Idle within segments", _EMPTY: "Idle, a whole segment"}
    return names.get(code) or CATEGORY_LABELS[_CATEGORIES[code]]


def _rows(found: SegmentMap, scale: int) -> tuple[tuple[SegmentRow, ...], I64, I64]:
    """Put the segments into rows, the largest first; returns the rows, and each segment's row and place in it."""
    layout = found.layout
    row_of, place_of = np.zeros(len(layout), np.int64), np.zeros(len(layout), np.int64)
    rows: list[SegmentRow] = []
    for pool, stream, expandable in _kinds(found):
        mine = np.flatnonzero((layout.pool == pool) & (layout.stream == stream) & ((layout.page > 0) == expandable))
        rest = mine[np.argsort(-layout.size[mine], kind="stable")].tolist()
        while rest:
            here: list[int] = []
            width = 0
            while rest and (not here or width + int(layout.size[rest[0]]) <= scale):
                segment = rest.pop(0)
                row_of[segment], place_of[segment] = len(rows), width
                width += int(layout.size[segment])
                here.append(segment)
            rows.append(_row(found, here, _kind_words(found, pool, stream, expandable), place_of))
    return tuple(rows), row_of, place_of


def _kinds(found: SegmentMap) -> list[tuple[int, int, bool]]:
    """List pool, stream and whether expandable, of every kind of segment, the one with most bytes first."""
    layout, sums = found.layout, dict[tuple[int, int, bool], int]()
    for pool, stream, page, size in zip(
        layout.pool.tolist(), layout.stream.tolist(), layout.page.tolist(), layout.size.tolist(), strict=True
    ):
        key = (pool, stream, page > 0)
        sums[key] = sums.get(key, 0) + size
    return sorted(sums, key=lambda key: (key[0] != 0, -sums[key]))


def _kind_words(found: SegmentMap, pool: int, stream: int, expandable: bool) -> str:
    private = dict.fromkeys(p for p in found.layout.pool.tolist() if p)
    name = pool_words(found.pools[list(private).index(pool)].identifier) if pool else "default pool"
    return ", ".join([name, f"stream {stream}", *(["expandable"] if expandable else [])])


def pool_words(identifier: tuple[int, int]) -> str:
    """Name a private pool.

    Its second number is set by ``graph_pool_handle`` and ``MemPool``, its first by a capture without either.
    """
    made_by = "of one CUDA graph" if identifier[0] else "of a MemPool or shared by CUDA graphs"
    return f"private pool {identifier}, {made_by}"


def _row(found: SegmentMap, here: Sequence[int], kind: str, place_of: I64) -> SegmentRow:
    layout = found.layout
    total, idle = int(layout.size[here].sum()), int(layout.idle[here].sum())
    number = f"{thousands(len(here))} segments" if len(here) > 1 else f"segment at {found.address_of(here[0]):#x}"
    return SegmentRow(
        f"{number}, {amount(total)} · {kind}",
        f"{amount(idle)} idle",
        tuple((int(place_of[s]), int(layout.size[s]), found.address_of(s)) for s in here),
    )


class _Pieces(NamedTuple):
    """Columns of blocks and free pieces in rows; places and sizes in bytes of the row."""

    row: I64
    place: I64
    size: I64
    colour: I64
    number: I64

    def sorted(self) -> _Pieces:
        return self.only(np.lexsort((self.place, self.row)))

    def only(self, chosen: NDArray[np.intp] | NDArray[np.bool_]) -> _Pieces:
        return _Pieces(*(column[chosen] for column in self))

    def merged(self, pixel: int) -> _Pieces:
        """Merge what is narrower than ``pixel`` bytes with such neighbours of its pixel, and equal ones with each
        other; the colour is that of most bytes."""
        small = self.size < pixel
        if not small.any():
            return self
        few = self.only(small)
        at = few.row * (1 << 40) + few.place // pixel
        _, cell = np.unique(at, return_inverse=True)
        n_cells = int(cell.max()) + 1
        by_colour = np.zeros((n_cells, 256), np.int64)
        np.add.at(by_colour, (cell, few.colour), few.size)
        first = np.searchsorted(cell, np.arange(n_cells))
        end = np.zeros(n_cells, np.int64)
        np.maximum.at(end, cell, few.place + few.size)
        cells = _Pieces(
            row=few.row[first],
            place=few.place[first],
            size=end - few.place[first],
            colour=np.argmax(by_colour, axis=1),
            number=np.bincount(cell, few.number, n_cells).astype(np.int64),
        )
        big = self.only(~small)
        both = _Pieces(*(np.concatenate(pair) for pair in zip(big, cells, strict=True)))
        was_small = np.concatenate([np.zeros(len(big.row), np.bool_), np.ones(n_cells, np.bool_)])
        order = np.lexsort((both.place, both.row))
        return _joined(both.only(order), was_small[order])


def _joined(pieces: _Pieces, small: NDArray[np.bool_]) -> _Pieces:
    """Join merged cells that touch and have one colour."""
    if not len(pieces.row):
        return pieces
    touch = pieces.place[1:] == (pieces.place + pieces.size)[:-1]
    alike = (pieces.row[1:] == pieces.row[:-1]) & (pieces.colour[1:] == pieces.colour[:-1])
    head = np.flatnonzero(np.concatenate([[True], ~(touch & alike & small[1:] & small[:-1])]))
    return _Pieces(
        pieces.row[head], pieces.place[head], np.add.reduceat(pieces.size, head), pieces.colour[head],
        np.add.reduceat(pieces.number, head),
    )  # fmt: skip


# ---- the picture -----------------------------------------------------------------------------------------------------


def segments_svg(drawing: MapDrawing) -> Markup:
    """Draw a map: one path a colour, a label above each row."""
    height = _ROW * len(drawing.rows) + 4
    per_byte = _WIDTH / drawing.scale
    paths: dict[int, list[str]] = {}
    numbers = drawing.rectangles
    for i in range(0, len(numbers), 5):
        row, place, size, colour, _ = numbers[i : i + 5]
        x, width = _LEFT + place * per_byte, max(size * per_byte, 0.4)
        width -= _SEPARATED if width > 4 else 0
        paths.setdefault(colour, []).append(f"M{x:.1f} {row * _ROW + 14}h{width:.1f}v{_BAR}h-{width:.1f}z")
    drawn = [
        el("path", {"class": f"block c-{drawing.colours[colour]}", "d": "".join(parts)})
        for colour, parts in sorted(paths.items())
    ]
    words = [
        join(
            el("text", {"x": _LEFT, "y": i * _ROW + 10}, f"{row.label} · {row.note}"),
            *[
                el("rect", {
                    "class": "outline", "x": f"{_LEFT + place * per_byte:.1f}", "y": i * _ROW + 14,
                    "width": f"{size * per_byte:.1f}", "height": _BAR,
                })
                for place, size, _ in row.segments
                if size * per_byte >= 4
            ],
        )
        for i, row in enumerate(drawing.rows)
    ]  # fmt: skip
    return el(
        "svg",
        {
            "viewBox": f"0 0 {2 * _LEFT + _WIDTH} {height}", "role": "img", "class": "segments-svg",
            "aria-label": f"Map of segments. {drawing.words}",
        },
        _HATCH,
        *drawn,
        *words,
    )  # fmt: skip


_HATCH = el(
    "defs",
    *[
        el(
            "pattern",
            {
                "id": f"idle-{name}", "width": 5, "height": 5, "patternUnits": "userSpaceOnUse",
                "patternTransform": "rotate(45)",
            },
            el("rect", {"width": 5, "height": 5, "class": "ground"}),
            el("rect", {"width": width, "height": 5, "class": f"stripe {name}"}),
        )
        for name, width in (("inactive_split", 2), ("cached", 1))
    ],
)  # fmt: skip
