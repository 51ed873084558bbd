"""The stacked timeline, thinned to a number of points without losing a peak."""

from __future__ import annotations

from typing import Any

import numpy as np

from memprof.attribution.model import Attribution
from memprof.curves import own_peaks, phase_peak_instants, sample_categories
from memprof.snapshot.model import I64
from memprof.timeline import Timeline

__all__ = ["build_series"]


def build_series(timeline: Timeline, attribution: Attribution, max_points: int = 4000) -> dict[str, Any]:
    """Bytes per category at chosen instants, the same instants for every category.

    Kept: the first, highest, lowest and last state of each bucket of events, every phase's ends and
    peak, each category's own peak, and the peak itself. About ``max_points`` in all.
    """
    instants = _instants(timeline, attribution, max_points)
    sampled = sample_categories(timeline, attribution, instants)
    spans = [
        {
            "phase": span.phase,
            "step": span.step,
            "within": span.within,
            "start_us": span.start_us,
            "end_us": span.end_us,
            "start_point": int(np.searchsorted(instants, span.start_event)),
            "end_point": int(np.searchsorted(instants, span.end_event)),
        }
        for span in attribution.track.spans
    ]
    return {
        "instant": instants.tolist(),
        "time_us": [timeline.time_us(int(k)) for k in instants],
        "phase_spans": spans,
        "categories": {str(category): values.tolist() for category, values in sampled.items()},
        "reserved": None if timeline.reserved is None else timeline.reserved[instants].tolist(),
        "peak_point": int(np.searchsorted(instants, timeline.peak_instant)),
    }


def _instants(timeline: Timeline, attribution: Attribution, max_points: int) -> I64:
    n = timeline.n_events + 1
    spans = attribution.track.spans
    forced = [
        np.array([0, n - 1, timeline.peak_instant], dtype=np.int64),
        phase_peak_instants(timeline, attribution),
        np.array([edge for s in spans for edge in (s.start_event, s.end_event)], dtype=np.int64),
        np.array([instant for _, instant in own_peaks(timeline, attribution).values()], dtype=np.int64),
    ]
    if n <= max_points:
        return np.arange(n, dtype=np.int64)
    starts = np.unique(np.linspace(0, n, max(max_points // 4, 1), endpoint=False).astype(np.int64))
    ends = np.append(starts[1:], n)
    extremes = [
        first + pick
        for first, end in zip(starts.tolist(), ends.tolist(), strict=True)
        for pick in _extremes(timeline.active[first:end])
    ]
    return np.unique(np.concatenate([*forced, np.array(extremes, dtype=np.int64)]))


def _extremes(values: I64) -> tuple[int, int, int, int]:
    return 0, int(np.argmax(values)), int(np.argmin(values)), len(values) - 1
