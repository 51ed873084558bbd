"""Make the timeline that the page's script draws: plotly's figure, its points thinned without losing a peak, packed."""

from __future__ import annotations

import base64
import gzip
import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from memprof.reports.document.model import AllocationRow, Document, Timeline
from memprof.reports.document.text import category_label, phase_label, phase_short
from memprof.reports.html.opened import Opened
from memprof.reports.palette import FALLBACK, LIGHT, PATTERNS, PHASES, slug

#: What plotly draws: its own format.
Figure = dict[str, object]
_Lives = tuple[tuple[int | None, int | None], ...]
#: Name, colour, bytes of each, lifetimes, whether alive at the peak, reference.
_Drawn = tuple[str, str, int, _Lives, int, str | None]

# Real runs take one to two bytes an event, packed. What takes more than this in all is thinned until it fits, which
# keeps the page below 2 MB beside plotly's 1.2.
MAX_PACKED = 650_000
# The phase axis travels in whole numbers, this many to a unit.
PHASE_UNIT = 1_000_000


class TimelineData(msgspec.Struct, frozen=True, kw_only=True):
    """What the page's script draws a timeline from, as it reads it: spans and allocations are lists of values."""

    figure: Figure
    n_points: int
    columns: tuple[str, ...]
    points: str
    spans: tuple[tuple[str, str, int | None, int, int, str], ...]
    phase_colours: dict[str, str]
    patterns: dict[str, str]
    labels: dict[str, str]
    peak_point: int
    clock_us: int
    unit: int
    timed: bool
    allocations: tuple[_Drawn, ...]


def timeline_data(whole: Timeline, document: Document, most: int, opened: Opened) -> TimelineData:
    """Collect what the script draws a timeline from, its points packed into ``most`` bytes or nearly so."""
    timeline, points = _fitted(whole, most)
    last = len(timeline.time_us) - 1
    spans = (
        (slug(s.phase), phase_label(s.phase), s.step, s.start_point, min(s.end_point, last), phase_short(s.phase))
        for s in timeline.spans
    )
    # The largest at the peak, and at the other phases' peaks: of those the panel says which are alive.
    largest = [(row, 1) for row in document.allocations] + [(row, 0) for row in document.elsewhere]
    return TimelineData(
        figure=timeline_figure(timeline),
        n_points=len(timeline.time_us),
        columns=tuple(_columns(timeline)),
        points=points,
        spans=tuple(spans),
        phase_colours=PHASES,
        patterns=PATTERNS,
        labels={c: category_label(c) for c in timeline.categories},
        peak_point=timeline.peak_point,
        clock_us=timeline.clock_us,
        unit=timeline.unit,
        timed=timeline.timed,
        allocations=tuple(_drawn(row, at_peak, opened) for row, at_peak in largest),
    )


def _drawn(row: AllocationRow, at_peak: int, opened: Opened) -> _Drawn:
    name = row.name or row.site or row.detail or row.label
    return name, slug(row.category), row.group.each_bytes, row.lives, at_peak, opened(row)


def _columns(timeline: Timeline) -> dict[str, Sequence[int]]:
    """Name everything drawn, in whole numbers: microseconds, parts of the phase axis, bytes."""
    columns: dict[str, Sequence[int]] = {
        "time": timeline.time_us,
        "phase": [round(x * PHASE_UNIT) for x in timeline.phase_x],
        **timeline.categories,
    }
    if timeline.reserved is not None:
        columns["reserved"] = timeline.reserved
    return columns


def _fitted(timeline: Timeline, most: int) -> tuple[Timeline, str]:
    """Pack the points, thinned where they would take more than ``most`` bytes; returns the thinned timeline too."""
    points = pack_columns(_columns(timeline).values())
    while len(points) > most and len(timeline.time_us) > 5000:
        timeline = thinned(timeline, len(timeline.time_us) // 2)
        points = pack_columns(_columns(timeline).values())
    return timeline, points


def pack_columns(columns: Iterable[Sequence[int]]) -> str:
    """Pack whole numbers as differences, their bytes of equal weight side by side, gzip'd, in base64.

    An event changes one category: nearly every difference is zero, and 200k events take some hundred kilobytes.
    """
    planes = []
    for column in columns:
        steps = np.diff(np.asarray(column, dtype=np.int64), prepend=0).astype("<i8")
        planes.append(steps.view(np.uint8).reshape(-1, 8).T.tobytes())
    return base64.b64encode(gzip.compress(b"".join(planes), 6, mtime=0)).decode()


def thinned(timeline: Timeline, max_points: int) -> Timeline:
    """Thin a timeline to about ``max_points`` points at most.

    Kept: the first, highest, lowest and last of each bucket of neighbours, the ends and the peak of every span, each
    category's own peak, and the peak; the points kept are the same for every category.
    """
    n_points = len(timeline.time_us)
    if n_points <= max_points:
        return timeline
    keep = {0, n_points - 1, timeline.peak_point}
    keep.update(max(range(n_points), key=values.__getitem__) for values in timeline.categories.values())
    buckets = max(max_points // 5, 1)
    edges = [n_points * i // buckets for i in range(buckets + 1)]
    ranges = list(itertools.pairwise(edges))
    for first, end in [*ranges, *((s.start_point, min(s.end_point, n_points)) for s in timeline.spans)]:
        inside = range(first, max(end, first + 1))
        keep.update((first, max(inside, key=timeline.total.__getitem__), inside[-1]))
        keep.add(min(inside, key=timeline.total.__getitem__))
    keep.update(min(s.end_point, n_points - 1) for s in timeline.spans)
    return _only(timeline, sorted(keep))


def _only(timeline: Timeline, keep: list[int]) -> Timeline:
    place = {point: i for i, point in enumerate(keep)}
    last = len(timeline.time_us) - 1
    return timeline._replace(
        time_us=tuple(timeline.time_us[k] for k in keep),
        phase_x=tuple(timeline.phase_x[k] for k in keep),
        spans=tuple(
            s._replace(start_point=place[s.start_point], end_point=place[min(s.end_point, last)])
            for s in timeline.spans
        ),
        categories={c: tuple(v[k] for k in keep) for c, v in timeline.categories.items()},
        reserved=None if timeline.reserved is None else tuple(timeline.reserved[k] for k in keep),
        total=tuple(timeline.total[k] for k in keep),
        peak_point=place[timeline.peak_point],
    )


def peak_hold(x: Sequence[float], total: Sequence[int], n_columns: int) -> list[tuple[float, int]]:
    """Find for every column of the axis the point with the highest total in it, as ``(column start, point)``.

    A column's candidates are the state it begins with and every point inside, so the highest total of the axis is
    always among the result. Columns that show the same point as their left neighbour are left out.
    """
    low, high = x[0], x[-1]
    if high <= low:
        return [(low, max(range(len(x)), key=total.__getitem__))]
    chosen: list[tuple[float, int]] = []
    for column in range(n_columns):
        start = low + (high - low) * column / n_columns
        first = bisect_left(x, start)
        if x[first] > start:
            first -= 1
        stop = len(x) if column == n_columns - 1 else bisect_left(x, low + (high - low) * (column + 1) / n_columns)
        best = max(range(first, max(stop, first + 1)), key=total.__getitem__)
        if not chosen or chosen[-1][1] != best:
            chosen.append((start, best))
    return chosen


def timeline_figure(timeline: Timeline) -> Figure:
    """Return what plotly draws, without its points, which are sent once and packed.

    An area of GiB per category, bottom of the stack first, and the reserved line. The page's script adds the phases.
    """
    both = {"hoverinfo": "skip", "mode": "lines", "type": "scatter"}
    traces: list[dict[str, object]] = [
        {
            **both, "name": category_label(category), "meta": category, "stackgroup": "memory",
            "fillcolor": LIGHT.get(category, FALLBACK), "line": {"shape": "hv", "width": 0},
        }
        for category in timeline.categories
    ]  # fmt: skip
    if timeline.reserved is not None:
        line = {"color": "#1c2024", "dash": "dot", "shape": "hv", "width": 1.3}
        traces.append({**both, "name": "Reserved", "meta": "reserved", "line": line})
    layout = {
        "margin": {"l": 46, "r": 8, "t": 42, "b": 44},
        "xaxis": {"range": [0.0, 1.0], "showgrid": False, "zeroline": False, "showticklabels": False},
        "yaxis": {"title": {"text": "GiB"}, "rangemode": "tozero", "fixedrange": True, "zeroline": False},
        "showlegend": False,
        "dragmode": "zoom",
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
    }
    return {"data": [dict(sorted(trace.items())) for trace in traces], "layout": layout}
