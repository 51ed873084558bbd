"""Fill the timeline: categories in stacking order, and the phases' spans over them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from memprof.reports.document.model import Span, Timeline
from memprof.reports.document.text import STACK_ORDER, phase_label, phase_short, plain


def timeline_of(series: Mapping[str, Any], *, timed: bool = True) -> Timeline:
    """Fill the timeline from a series of one point or more, as ``Analysis.series`` gives it; ``timed``: as recorded."""
    start = series["time_us"][0]
    known = [c for c in STACK_ORDER if any(series["categories"].get(c, ()))]
    others = [c for c in series["categories"] if c not in STACK_ORDER and any(series["categories"][c])]
    categories = {c: tuple(series["categories"][c]) for c in known + others}
    n_points = len(series["time_us"])
    total = tuple(map(sum, zip(*categories.values(), strict=True))) if categories else (0,) * n_points
    time_us = tuple(t - start for t in series["time_us"])
    spans = tuple(_span(s) for s in series["phase_spans"] if s["end_point"] > s["start_point"])
    return Timeline(
        clock_us=start,
        time_us=time_us,
        phase_x=_phase_axis(n_points, spans),
        spans=spans,
        categories=categories,
        reserved=None if series["reserved"] is None else tuple(series["reserved"]),
        total=total,
        peak_point=series["peak_point"],
        timed=timed,
    )


def _span(span: Mapping[str, Any]) -> Span:
    return Span(
        phase=plain(span["phase"]),
        label=plain(phase_label(span["phase"])),
        short=plain(phase_short(span["phase"])),
        step=span["step"],
        start_point=span["start_point"],
        end_point=span["end_point"],
    )


# What is between the phases gets less room than they do.
_NARROW = {"other": 0.3}


def _phase_axis(n_points: int, spans: Sequence[Span]) -> tuple[float, ...]:
    """Place each point on an axis where every phase is one unit wide, its points spread evenly over it.

    Without spans the whole recording is one unit.
    """
    edges = [0, *(s.start_point for s in spans), *(s.end_point for s in spans), max(n_points - 1, 0)]
    stops = sorted(set(edges))
    widths = {s.start_point: _NARROW.get(s.phase, 1.0) for s in spans}
    places, x = {}, 0.0
    for stop, following in zip(stops, [*stops[1:], None], strict=True):
        places[stop] = (x, following)
        x += widths.get(stop, 0.0) if spans else 1.0
    return tuple(_place(point, stops, places) for point in range(n_points))


def _place(point: int, stops: list[int], places: dict[int, tuple[float, int | None]]) -> float:
    stop = stops[bisect_right(stops, point) - 1]
    x, following = places[stop]
    if following is None:
        return x
    width = places[following][0] - x
    return x + width * (point - stop) / (following - stop)
