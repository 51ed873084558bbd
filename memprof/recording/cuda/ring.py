"""Judge by device how much of the history a trace holds: from the trace, the allocator's counts, and what was in use.

torch keeps a ring of events for each device. A full one overwrites its oldest events, and so does one that the program
shortens. One that the program clears or stops loses all; one that it enlarges is no longer in the order of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from memprof.recording.cuda.history_gaps import Gap, fill_gaps, without_partial
from memprof.recording.recorder import DeviceHistory, Segment, Trace, TraceEntry
from memprof.vocabulary import History

#: States of blocks that are not free.
ACTIVE = ("active_allocated", "active_pending_free", "active_awaiting_free")
# Microseconds by which torch's clock, read off the processor's, may differ from this process's.
_CLOCK = 1000


class AllocationCount(NamedTuple):
    """Hold what the allocator has counted on a device: blocks allocated and freed so far, and those in use."""

    allocated: int = 0
    freed: int = 0
    current: int = 0

    def since(self, start: AllocationCount) -> int:
        """Return the allocations since ``start``; a part of them if the program has reset the counts meanwhile."""
        is_reset = self.current - (self.allocated - self.freed) != start.current - (start.allocated - start.freed)
        return self.allocated if is_reset else max(0, self.allocated - start.allocated)


class HistoryEvidence(NamedTuple):
    """Hold what is known of a device's history from elsewhere than its trace.

    Attributes:
        device: its index.
        start_us: when memprof began to record.
        stop_us: when the trace was read.
        before: addresses of the blocks in use at ``start_us``.
        after: addresses of the blocks in use at ``stop_us``.
        allocations: how many the trace must show; those in the gaps of a thinned history are not counted.
        max_entries: size of the ring; None if the program has chosen it.
    """

    device: int
    start_us: int
    stop_us: int
    before: set[int]
    after: set[int]
    allocations: int
    max_entries: int | None


class Judged(NamedTuple):
    """Hold the part of a device's trace that has no holes, with its gaps filled.

    Attributes:
        trace: the events.
        gaps: the gaps that lie in it.
        history: how much of the device's history it is.
        is_disturbed: whether events are missing that no full ring explains.
    """

    trace: Trace
    gaps: list[Gap]
    history: DeviceHistory
    is_disturbed: bool


def judge(trace: Trace, gaps: Sequence[Gap], known: HistoryEvidence) -> Judged:
    """Judge a device's trace, as torch returns it; ``gaps`` are those of a thinned history, in the order of time."""
    # One that reaches further back than the recording has lost nothing of it: another recording has begun it.
    is_older = bool(trace) and _time(trace[0]) < known.start_us - _CLOCK
    is_full = known.max_entries is not None and len(trace) >= known.max_entries and not is_older
    trace = without_partial(trace, gaps)
    if all(_time(a) <= _time(b) for a, b in pairwise(trace)):
        is_whole = not is_full and _is_whole(trace, gaps, known)  # a full ring is truncated, whatever it shows
    else:
        order = sorted(range(len(trace)), key=lambda i: _time(trace[i]))
        trace = [trace[i] for i in order]
        is_whole = _is_whole(trace, gaps, known)
        trace = trace if is_whole else trace[_newest_run(order) :]
    start_us, extent = known.start_us, History.STARTED_LATE if known.before else History.COMPLETE
    if is_full or not is_whole:
        start_us, extent = max(start_us, _time(trace[0]) if trace else known.stop_us), History.TRUNCATED
    inside = [gap for gap in gaps if gap.end_us >= start_us]
    filled = fill_gaps(trace, inside, known.device)
    return Judged(filled, inside, DeviceHistory(known.device, start_us, extent), not is_whole and not is_full)


def _is_whole(trace: Trace, gaps: Sequence[Gap], known: HistoryEvidence) -> bool:
    """Tell whether a trace leads from the blocks in use at the start to those in use at the end, and shows as many
    allocations as torch has counted: a loop whose blocks have all been freed again leaves no other sign."""
    first = known.start_us - _CLOCK  # a history of the program's may reach further back
    if sum(entry["action"] == "alloc" for entry in trace if _time(entry) >= first) < known.allocations:
        return False
    in_use = set(known.before)
    for entry in fill_gaps(trace, list(gaps), known.device):
        if _time(entry) < first:
            continue
        if entry["action"] == "alloc":
            in_use.add(entry["addr"])
        elif entry["action"] == "free_completed":
            if entry["addr"] not in in_use and _time(entry) > known.start_us + _CLOCK:
                return False
            in_use.discard(entry["addr"])
    return in_use == known.after


def _newest_run(order: list[int]) -> int:
    """Return where the newest events begin that lie next to each other in the ring, given the events' places there in
    the order of time."""
    return max((i + 1 for i, (a, b) in enumerate(pairwise(order)) if b != a + 1), default=0)


def _time(entry: TraceEntry) -> int:
    return int(entry["time_us"])


def blocks_in_use(segments: list[Segment]) -> dict[int, set[int]]:
    """Return by device the addresses of the blocks that are not free."""
    found: dict[int, set[int]] = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] in ACTIVE:
                found.setdefault(segment.get("device", 0), set()).add(block.get("address", address))
            address += block["size"]
    return found
