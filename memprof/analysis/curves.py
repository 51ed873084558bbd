"""Compute the bytes of each category over the instants of a timeline, one category at a time.

A million events and eighteen categories would make 144 MB of curves, so each is made, read and dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memprof.attribution.result import Attribution, PhaseSpan
from memprof.snapshot.model import I64, distinct
from memprof.timeline.timeline import Timeline
from memprof.vocabulary import GROUP_OF, Category, Group, Phase

CATEGORIES = list(Category)


def category_curve(timeline: Timeline, rows: NDArray[np.bool_]) -> I64:
    """Return the active bytes of the chosen rows at every instant, shape ``[n_events + 1]``."""
    delta = np.zeros(timeline.n_events + 1, dtype=np.int64)
    chosen = np.flatnonzero(rows)
    begin, end, size = timeline.alloc_event[chosen], timeline.free_event[chosen], timeline.size[chosen]
    ghosts = int(np.searchsorted(begin, 0))  # rows are in order of birth
    delta[0] = size[:ghosts].sum()
    # An event begins or ends at most one allocation, so plain assignment loses nothing.
    delta[begin[ghosts:] + 1] += size[ghosts:]
    died = end < timeline.n_events
    delta[end[died] + 1] -= size[died]
    return np.cumsum(delta, out=delta)


def _curves(timeline: Timeline, attribution: Attribution) -> Iterator[tuple[Category, I64]]:
    present = np.bincount(attribution.category, minlength=len(CATEGORIES))
    for code, category in enumerate(CATEGORIES):
        if present[code]:
            yield category, category_curve(timeline, attribution.category == code)


def own_peaks(timeline: Timeline, attribution: Attribution) -> dict[Category, tuple[int, int]]:
    """Return for each category that occurs its highest bytes over the run, and the first such instant."""
    peaks = {}
    for category, curve in _curves(timeline, attribution):
        instant = int(np.argmax(curve))
        peaks[category] = (int(curve[instant]), instant)
    return peaks


def group_peaks(timeline: Timeline, attribution: Attribution) -> dict[Group, int]:
    """Return each group's highest bytes over the run: the peak of its sum, not the sum of its members' peaks."""
    group_of_code = np.array([GROUP_OF[c].code for c in CATEGORIES], dtype=np.uint8)
    groups = group_of_code[attribution.category]
    return {
        group: int(category_curve(timeline, groups == group.code).max()) for group in Group if group is not Group.TOTAL
    }


def sample_categories(timeline: Timeline, attribution: Attribution, instants: I64) -> dict[Category, I64]:
    """Return the active bytes of each category that occurs, at the given instants."""
    return {category: curve[instants] for category, curve in _curves(timeline, attribution)}


def phase_peak_instants(timeline: Timeline, attribution: Attribution) -> I64:
    """Return for each phase span the first instant of its highest requested bytes.

    Requested bytes decide, not blocks: a phase can repeat itself, as an optimizer's steps do, and rounding alone
    would then choose among its equal peaks. Only instants after an event of the span count, because the memory at its
    start is the previous phase's. A span without events is placed at its start.
    """
    instants = np.zeros(len(attribution.track.spans), dtype=np.int64)
    for i, span in enumerate(attribution.track.spans):
        first = min(span.start_event + 1, span.end_event)
        instants[i] = first + int(np.argmax(timeline.requested_total[first : span.end_event + 1]))
    return instants


def highest_allocated(timeline: Timeline, span: PhaseSpan) -> int:
    """Return the most bytes of blocks the program held in a phase, including those it began with.

    The allocator's own peak counter gives the same figure when it is reset at the start of the phase.
    """
    return int(timeline.allocated[span.start_event : max(span.end_event, span.start_event) + 1].max())


def phase_maxima(timeline: Timeline, attribution: Attribution) -> dict[str, tuple[int, int]]:
    """Return for each phase, in the order they begin, its highest allocated and highest reserved bytes."""
    codes = attribution.track.phase
    found: dict[str, tuple[int, int]] = {}
    for code in dict.fromkeys(codes.tolist()):
        during = np.flatnonzero(codes == code) + 1
        reserved = 0 if timeline.reserved is None else int(timeline.reserved[during].max())
        found[str(list(Phase)[code])] = (int(timeline.allocated[during].max()), reserved)
    return found


@dataclass(frozen=True)
class SeriesSpan:
    """A stretch of a phase; ``start_point`` and ``end_point`` are indices of a series' points."""

    phase: str
    step: int | None
    start_point: int
    end_point: int


@dataclass(frozen=True)
class Series:
    """Bytes at chosen instants, the same for every category.

    Attributes:
        instants: the number of events before each.
        time_us: when, in microseconds.
        spans: stretches of phases.
        categories: bytes of each category.
        reserved: reserved memory; ``None`` for a CPU recording.
        peak_point: the index of the run's peak.
    """

    instants: list[int]
    time_us: list[int]
    spans: tuple[SeriesSpan, ...]
    categories: dict[Category, list[int]]
    reserved: list[int] | None
    peak_point: int


def build_series(
    timeline: Timeline,
    attribution: Attribution,
    max_points: int = 4000,
    peak: int | None = None,
    not_in_history: int = 0,
) -> Series:
    """Return the bytes of each category at chosen instants, the same for every category.

    The instants are the first, highest, lowest and last of each bucket of events, the ends and peak of every
    phase, each category's own peak, and the peak of the run: about ``max_points`` in all.

    Args:
        peak: the instant of the run's peak; default: the history's.
        not_in_history: bytes that the allocator counted there beyond the history, drawn as unattributed.
    """
    peak = timeline.peak_instant if peak is None else peak
    instants = _instants(timeline, attribution, max_points, peak)
    sampled = sample_categories(timeline, attribution, instants)
    peak_point = int(np.searchsorted(instants, peak))
    reserved = None if timeline.reserved is None else timeline.reserved[instants]
    if not_in_history:
        unknown = sampled.setdefault(Category.UNATTRIBUTED, np.zeros(len(instants), np.int64))
        unknown[peak_point] += not_in_history
        if reserved is not None:
            reserved[peak_point] = max(int(reserved[peak_point]), int(timeline.active[peak]) + not_in_history)
    spans = tuple(
        SeriesSpan(
            phase=span.phase,
            step=span.step,
            start_point=int(np.searchsorted(instants, span.start_event)),
            end_point=int(np.searchsorted(instants, span.end_event)),
        )
        for span in attribution.track.spans
    )
    return Series(
        instants=instants.tolist(),
        time_us=timeline.times_us(instants).tolist(),
        spans=spans,
        categories={category: values.tolist() for category, values in sampled.items()},
        reserved=None if reserved is None else reserved.tolist(),
        peak_point=peak_point,
    )


def _instants(timeline: Timeline, attribution: Attribution, max_points: int, peak: int) -> I64:
    n = timeline.n_events + 1
    spans = attribution.track.spans
    forced = [
        np.array([0, n - 1, peak], dtype=np.int64),
        phase_peak_instants(timeline, attribution),
        np.array([edge for s in spans for edge in (s.start_event, s.end_event)], dtype=np.int64),
        np.array([instant for _, instant in own_peaks(timeline, attribution).values()], dtype=np.int64),
    ]
    if n <= max_points:
        return np.arange(n, dtype=np.int64)
    starts = distinct(np.linspace(0, n, max(max_points // 4, 1), endpoint=False).astype(np.int64))
    last = np.append(starts[1:], n) - 1
    highest = _first_extremes(np.maximum, timeline.active, starts)
    lowest = _first_extremes(np.minimum, timeline.active, starts)
    return distinct(np.concatenate([*forced, starts, highest, lowest, last]))


# Buckets at a time, so that a value repeated for each of their events stays small.
_BUCKETS = 1024


def _first_extremes(extreme: np.ufunc, values: I64, starts: I64) -> I64:
    """Return where each bucket of values first has its maximum or minimum.

    Args:
        extreme: ``np.maximum`` or ``np.minimum``.
        starts: where the buckets begin, the first at 0; none is empty.
    """
    found = []
    for at in range(0, len(starts), _BUCKETS):
        begin = starts[at : at + _BUCKETS]
        part = values[begin[0] : starts[at + _BUCKETS] if at + _BUCKETS < len(starts) else len(values)]
        offset = begin - begin[0]
        best = np.repeat(extreme.reduceat(part, offset), np.diff(offset, append=len(part)))
        hits = np.flatnonzero(part == best)
        found.append(begin[0] + hits[np.searchsorted(hits, offset)])
    return np.concatenate(found)
