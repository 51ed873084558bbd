"""Hold the history against the allocator's own counters, which miss nothing.

A ring of events that overflowed inside a step, or a stretch of decoding that was left out, can hide the true peak. The
recorder noted the counters of every phase beside the history (``counters`` in the snapshot). Where one is higher than
anything the history shows of its phase, the difference is what the history does not hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from memprof.attribution.result import PhaseSpan
from memprof.snapshot.model import Snapshot
from memprof.snapshot.recorded_run import PhaseCounters
from memprof.timeline.timeline import Timeline
from memprof.units import format_bytes
from memprof.vocabulary import History, Phase

DETAIL = "not_in_history"


@dataclass(frozen=True)
class UnrecordedPeak:
    """Hold what a counter saw beyond the history.

    ``instant`` is where the history comes nearest to the peak, and ``bytes`` are missing there (``requested`` of them
    as the program asked for them). ``span`` is the phase that was counted, on the recording's clock.
    """

    bytes: int
    requested: int
    instant: int
    span: PhaseSpan


def unseen_at_peak(snapshot: Snapshot, timeline: Timeline, spans: Sequence[PhaseSpan]) -> UnrecordedPeak | None:
    """Return what the history does not show of the run's allocated peak; None where it shows all of it."""
    highest = max(_counted(snapshot, timeline), key=_peak, default=None)
    if highest is None or _peak(highest) <= int(timeline.allocated.max()):
        return None
    return _unseen(highest, timeline, spans)[0]


def unseen_by_span(snapshot: Snapshot, timeline: Timeline, spans: Sequence[PhaseSpan]) -> dict[int, UnrecordedPeak]:
    """Return by index of ``spans`` what the history does not show of phases' peaks.

    Only phases that the history may lack a part of are looked at: in a whole one the clock alone could put the last
    event of a phase into the next.
    """
    found: dict[int, UnrecordedPeak] = {}
    for row in _counted(snapshot, timeline):
        if not _lacks_some(snapshot, timeline, row):
            continue
        unseen, at = _unseen(row, timeline, spans)
        if at is not None and unseen.bytes > 0 and (at not in found or found[at].bytes < unseen.bytes):
            found[at] = unseen
    return found


def counted_requested(snapshot: Snapshot, timeline: Timeline) -> int:
    """Return the highest requested bytes that were counted; 0 where none were."""
    return max((row.requested_peak or 0 for row in _counted(snapshot, timeline)), default=0)


def counted_reserved(snapshot: Snapshot, timeline: Timeline) -> tuple[int, Phase, int | None]:
    """Return the highest reserved bytes that were counted, and their phase and step; 0 where none were."""
    rows = [(row.reserved_peak or 0, row.phase, row.step) for row in _counted(snapshot, timeline)]
    return max(rows, key=lambda row: row[0], default=(0, Phase.OTHER, None))


def unseen_note(unseen: UnrecordedPeak, snapshot: Snapshot, timeline: Timeline) -> str:
    """Say which part of the peak the history lacks, why, and what to change."""
    seen = int(timeline.allocated[unseen.instant])
    step = "" if unseen.span.step is None else f" of step {unseen.span.step}"
    return (
        f"The allocator's counter says {format_bytes(seen + unseen.bytes)} at the peak, in {unseen.span.phase}{step}; "
        f"the history shows {format_bytes(seen)} of it. The other {format_bytes(unseen.bytes)} are not in the history "
        f"and count as unattributed{_reason(unseen, snapshot, timeline)}"
    )


def _reason(unseen: UnrecordedPeak, snapshot: Snapshot, timeline: Timeline) -> str:
    if _thinned(snapshot, unseen.span.start_us, unseen.span.end_us):
        return ": they came and went between decoded tokens that were left out."
    if _overflowed(snapshot, timeline):
        most = snapshot.run.recorded.max_entries
        kept = f" (it records the last {most:,})" if most else ""
        return f": the ring of events overwrote them{kept}. Use a larger max_entries or record less."
    return "."


def _counted(snapshot: Snapshot, timeline: Timeline) -> Iterator[PhaseCounters]:
    """Yield the counters that are about the timeline's device and hold a peak."""
    if not snapshot.recorder_asked_about(timeline.device):
        return
    yield from (row for row in snapshot.run.counters if row.allocated_peak is not None)


def _peak(row: PhaseCounters) -> int:
    return row.allocated_peak or 0


def _window(row: PhaseCounters, timeline: Timeline) -> tuple[int, int]:
    """Return the first and the last instant of a counted phase; both 0 where it is older than the history."""
    first = int(np.searchsorted(timeline.event_us, row.start_us, side="left"))
    return first, max(first, int(np.searchsorted(timeline.event_us, row.end_us, side="right")))


def _unseen(row: PhaseCounters, timeline: Timeline, spans: Sequence[PhaseSpan]) -> tuple[UnrecordedPeak, int | None]:
    """Return what a counter saw beyond the history, and the span that comes nearest to it (None where all are lost)."""
    first, last = _window(row, timeline)
    instant, nearest = first, None
    for i, span in enumerate(spans):
        if span.phase != row.phase or span.start_event >= last or span.end_event <= first:
            continue
        begin, end = max(first, span.start_event), min(last, span.end_event)
        highest = begin + int(np.argmax(timeline.allocated[begin : end + 1]))
        if nearest is None or timeline.allocated[highest] > timeline.allocated[instant]:
            instant, nearest = highest, i
    missing = _peak(row) - int(timeline.allocated[instant])
    requested = row.requested_peak
    asked = missing if requested is None else requested - int(timeline.requested_total[instant])
    span = PhaseSpan(row.phase, row.step, first, last, row.start_us, row.end_us)
    return UnrecordedPeak(missing, min(max(asked, 0), missing), instant, span), nearest


def _lacks_some(snapshot: Snapshot, timeline: Timeline, row: PhaseCounters) -> bool:
    start = snapshot.run.recorded.start_us
    if _overflowed(snapshot, timeline) and (start is None or row.start_us < start):
        return True
    return _thinned(snapshot, row.start_us, row.end_us)


def _overflowed(snapshot: Snapshot, timeline: Timeline) -> bool:
    """Tell whether the ring of events lost its oldest."""
    return timeline.history is History.TRUNCATED or bool(snapshot.run.recorded.dropped_events)


def _thinned(snapshot: Snapshot, start_us: int, end_us: int) -> bool:
    """Tell whether decoded tokens were left out of the history in that time."""
    return any(span.start_us <= end_us and start_us <= span.end_us for span in snapshot.run.recorded.thinned)
