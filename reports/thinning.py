"""Thin a timeline without losing a peak."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence

from memprof.reports.document.model import TimelineSeries


def thinned(timeline: TimelineSeries, max_points: int) -> TimelineSeries:
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
    if timeline.failed is not None:
        keep.add(timeline.failed.point)
    return _only(timeline, sorted(keep))


def _only(timeline: TimelineSeries, keep: list[int]) -> TimelineSeries:
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
        instants=tuple(timeline.instants[k] for k in keep) if timeline.instants else (),
        failed=None if timeline.failed is None else timeline.failed._replace(point=place[timeline.failed.point]),
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
