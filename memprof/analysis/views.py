"""Give views of one analysed device: peaks, phases, allocations and series. No view changes the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from memprof.analysis.allocations.alike import TimedGroup, largest_groups
from memprof.analysis.allocations.stacks import ReadableStacks, outermost_calls
from memprof.analysis.breakdown import Breakdown
from memprof.analysis.curves import group_peaks, own_peaks, phase_peak_instants
from memprof.analysis.peaks.counter_check import (
    UnrecordedPeak,
    counted_requested,
    counted_reserved,
    unseen_at_peak,
    unseen_by_span,
)
from memprof.attribution.result import Attribution
from memprof.errors import UsageError, did_you_mean
from memprof.report.allocations import Allocation
from memprof.snapshot import Snapshot
from memprof.snapshot.model import I64, signed, unsigned
from memprof.timeline.segment_layout import idle_memory
from memprof.timeline.timeline import Timeline
from memprof.vocabulary import Category, Evidence, Group, Kind, Phase

if TYPE_CHECKING:
    from memprof.analysis.curves import Series

_PHASES = list(Phase)
_CATEGORIES = list(Category)
_EVIDENCE = list(Evidence)


@dataclass(frozen=True)
class ReservedGrowth:
    """Hold the bytes by which one stack (interned id, 0 unknown) raised the device peak in one phase."""

    bytes: int
    phase: Phase
    stack: int


@dataclass(frozen=True)
class DevicePeakView:
    """Hold the most bytes the device held for this process: reserved plus, where known, memory outside torch.

    ``grown_by`` adds up to ``reserved_bytes``, the largest entries first. ``active_bytes`` were in use then; None where
    only the allocator's counter saw the moment.
    """

    reserved_bytes: int
    active_bytes: int | None
    non_torch_bytes: int | None
    instant: int
    time_us: int
    phase: Phase
    step: int | None
    grown_by: list[ReservedGrowth]


class Views:
    """Give views of a snapshot's attributed device, each computed when asked for."""

    def __init__(self, snapshot: Snapshot, timeline: Timeline, attribution: Attribution) -> None:
        self.snapshot, self.timeline, self.attribution = snapshot, timeline, attribution

    @property
    def non_torch_bytes(self) -> int | None:
        """Return the process's bytes on this device outside torch, by the driver; None where it was not asked."""
        snapshot = self.snapshot
        return snapshot.run.non_torch_bytes if snapshot.recorder_asked_about(self.timeline.device) else None

    @property
    def timed(self) -> bool:
        """Tell whether the clock counts microseconds: some recordings have no times, and simulations count events."""
        trace = self.snapshot.traces.get(self.timeline.device)
        return self.snapshot.kind is not Kind.SIMULATED and trace is not None and trace.has_times

    @cached_property
    def stacks(self) -> ReadableStacks:
        """Return the snapshot's stacks as they are written for a reader."""
        return ReadableStacks(self.snapshot)

    @cached_property
    def outermost_calls(self) -> tuple[I64, I64]:
        """Return of each stack the number of its outermost module's call, -1 for none, and of its Python frames."""
        return outermost_calls(self.snapshot)

    @cached_property
    def _split(self) -> Callable[[int], dict[str, int]]:
        return idle_memory(self.timeline)

    def breakdown(self, instant: int) -> Breakdown:
        """Return the composition at any instant ``0 <= instant <= timeline.n_events``."""
        return Breakdown(self.timeline, self.attribution, instant, split=self._split)

    @cached_property
    def peak(self) -> Breakdown:
        """Return the composition at the allocated peak, which the allocator's counter decides where it saw more."""
        unseen = self.unseen
        if unseen is None:
            return self.breakdown(self.timeline.peak_instant)
        return Breakdown(
            self.timeline, self.attribution, unseen.instant, span=unseen.span, split=self._split, unseen=unseen
        )

    @cached_property
    def unseen(self) -> UnrecordedPeak | None:
        """Return what the history does not show of the allocated peak; None where it shows all of it."""
        return unseen_at_peak(self.snapshot, self.timeline, self.attribution.track.spans)

    @cached_property
    def phases(self) -> list[Breakdown]:
        """Return the composition at the peak of every phase span, in order of time."""
        spans = self.attribution.track.spans
        unseen = unseen_by_span(self.snapshot, self.timeline, spans)
        instants = phase_peak_instants(self.timeline, self.attribution).tolist()
        instants = [unseen[i].instant if i in unseen else instant for i, instant in enumerate(instants)]
        return [
            Breakdown(self.timeline, self.attribution, at, span=span, split=self._split, unseen=unseen.get(i))
            for i, (span, at) in enumerate(zip(spans, instants, strict=True))
        ]

    @cached_property
    def own_peaks(self) -> dict[Category, int]:
        """Return the highest bytes of each category over the run; these peaks need not coincide."""
        peaks = {c: peak for c, (peak, _) in own_peaks(self.timeline, self.attribution).items()}
        if most := self._unattributed_and_unseen:
            peaks[Category.UNATTRIBUTED] = max(most, peaks.get(Category.UNATTRIBUTED, 0))
        return peaks

    @property
    def _unattributed_and_unseen(self) -> int:
        """Return the highest unattributed bytes at a peak that the history does not show whole."""
        partly = (b for b in (self.peak, *self.phases) if b.not_in_history_bytes)
        return max((b.categories[Category.UNATTRIBUTED] for b in partly), default=0)

    @cached_property
    def group_own_peaks(self) -> dict[Group, int]:
        """Return the highest bytes of each group over the run; ``total`` is the active peak."""
        peaks = group_peaks(self.timeline, self.attribution)
        peaks[Group.TOTAL] = max(int(self.timeline.active.max()), self.peak.active_bytes)
        peaks[Group.UNATTRIBUTED] = max(self._unattributed_and_unseen, peaks[Group.UNATTRIBUTED])
        return peaks

    @property
    def max_requested(self) -> int:
        """Return the highest total of requested bytes, by the history or the allocator's counter."""
        return max(self.timeline.max_requested, counted_requested(self.snapshot, self.timeline))

    @cached_property
    def device_peak(self) -> DevicePeakView | None:
        """Return the device peak; ``None`` for a tensor trace, which reserves nothing."""
        reserved = self.timeline.reserved
        if reserved is None:
            return None
        instant = int(np.argmax(reserved))
        here = self.breakdown(instant)
        seen = DevicePeakView(
            reserved_bytes=int(reserved[instant]),
            active_bytes=here.active_bytes,
            non_torch_bytes=self.non_torch_bytes,
            instant=instant,
            time_us=here.time_us,
            phase=here.phase,
            step=here.step,
            grown_by=self._growth(reserved, instant),
        )
        counted, phase, step = counted_reserved(self.snapshot, self.timeline)
        if counted <= seen.reserved_bytes:
            return seen
        grown = sorted(
            [*seen.grown_by, ReservedGrowth(counted - seen.reserved_bytes, phase, 0)], key=lambda growth: -growth.bytes
        )
        return replace(seen, reserved_bytes=counted, active_bytes=None, phase=phase, step=step, grown_by=grown)

    def _growth(self, reserved: I64, peak: int) -> list[ReservedGrowth]:
        """List by phase and stack who raised the running maximum of ``reserved`` up to the instant ``peak``."""
        highest = np.maximum.accumulate(reserved[: peak + 1])
        raised = np.diff(highest, prepend=0)
        bytes_by: dict[tuple[Phase, int], int] = {}
        trace = self.snapshot.traces.get(self.timeline.device)
        for instant in np.flatnonzero(raised):
            before = instant == 0 or trace is None or not len(trace)
            phase = Phase.LOAD if before else _PHASES[self.attribution.track.phase[instant - 1]]
            key = (phase, 0 if before or trace is None else int(trace.stack[instant - 1]))
            bytes_by[key] = bytes_by.get(key, 0) + int(raised[instant])
        found = [ReservedGrowth(n, phase, stack) for (phase, stack), n in bytes_by.items()]
        return sorted(found, key=lambda growth: -growth.bytes)

    @cached_property
    def holders(self) -> dict[int, list[str]]:
        """Return, by row, the names that held the largest unowned tensors when the recording ended."""
        found: dict[int, list[str]] = {}
        for holder in self.snapshot.run.holders:
            row = self.timeline.row_at(holder.address, self.timeline.instant_at(holder.time_us))
            if row is not None:
                found[row] = list(holder.names)
        return found

    def allocation(self, row: int) -> Allocation:
        """Return all that is known of one allocation."""
        line, found = self.timeline, self.attribution
        died = int(line.died_us[row])
        step = int(found.step[row])
        return Allocation(
            address=unsigned(line.address[row]),
            bytes=int(line.size[row]),
            requested_bytes=int(line.requested[row]),
            category=_CATEGORIES[found.category[row]],
            detail=found.details[found.detail[row]] or None,
            name=found.names[found.name[row]] or None,
            evidence=_EVIDENCE[found.evidence[row]],
            rule=found.rules[found.rule[row]] or None,
            alternatives=tuple(found.alternative_sets[found.alternatives[row]]),
            phase=_PHASES[found.phase[row]],
            step=None if step < 0 else step,
            born_us=int(line.born_us[row]) if line.alloc_event[row] >= 0 else None,
            died_us=None if died < 0 else died,
            retained=bool(found.retained[row]),
            held_by=tuple(self.holders.get(row, ())),
            tag=self.snapshot.metadata[line.metadata[row]] or None,
            stack=tuple(self.stacks.of(int(line.stack[row]))),
        )

    def instant_of(self, at: str) -> int:
        """Return the instant that ``--at`` names: ``peak``, ``device-peak``, ``phase:NAME`` or microseconds.

        Raises:
            UsageError: the run has no such phase, or the time lies outside the recording.
        """
        if at == "peak":
            return self.peak.instant
        if at == "device-peak":
            peak = self.device_peak
            if peak is None:
                raise UsageError("A CPU recording reserves no device memory, so it has no device peak. Use --at peak.")
            return peak.instant
        if at.startswith("phase:"):
            return self._phase_instant(at.removeprefix("phase:"))
        if not at.isdecimal():
            raise UsageError(f"--at {at!r}: give peak, device-peak, phase:NAME or a time in microseconds.")
        return self._time_instant(int(at))

    def _phase_instant(self, phase: str) -> int:
        found = [b for b in self.phases if b.phase == phase]
        if not found:
            seen = ", ".join(sorted({b.phase for b in self.phases})) or "none"
            meant = did_you_mean(phase, seen.split(", "))
            raise UsageError(f"no phase {phase!r} in this run{meant}; phases seen: {seen}.")
        return max(found, key=lambda b: b.not_in_history_bytes + int(self.timeline.requested_total[b.instant])).instant

    def _time_instant(self, time_us: int) -> int:
        times = self.timeline.event_us
        if not len(times) or not times[0] <= time_us <= times[-1]:
            span = f"{times[0]} to {times[-1]}" if len(times) else "without events"
            unit = " µs" if self.timed else ""
            raise UsageError(f"--at {time_us} lies outside the recording ({span}{unit}).")
        return self.timeline.instant_at(time_us)

    def explain(
        self, at: str = "peak", category: str | None = None, top: int | None = None, address: int | None = None
    ) -> tuple[Allocation, ...]:
        """List allocations alive at an instant, largest first (see :meth:`instant_of`, :meth:`allocation`).

        ``address`` picks the block that contains it; ``top`` limits the number.
        """
        return tuple(self.allocation(int(row)) for row in self._largest(self._alive(at, category, address), top))

    def largest(
        self, top: int | None = 10, at: str = "peak", category: str | None = None, address: int | None = None
    ) -> tuple[TimedGroup, ...]:
        """List what is alive at an instant as :meth:`explain` does, alike allocations folded, the largest sum first.

        Everything alive is folded before the ``top`` are taken, so the sums are those of the categories.
        """
        return tuple(largest_groups(self, self._alive(at, category, address), top))

    def _alive(self, at: str, category: str | None, address: int | None) -> I64:
        """Return the rows alive at an instant, of one category or around one address where that is asked for."""
        line = self.timeline
        rows = line.alive_at(self.instant_of(at))
        if category is not None:
            rows = rows[self.attribution.category[rows] == _code_of(category)]
        if address is not None:
            place = signed([address])
            rows = rows[(line.address[rows] <= place) & (place < line.address[rows] + line.size[rows])]
        return rows

    def explain_phases(self, each: int = 12, spans: int = 8) -> tuple[Allocation, ...]:
        """List the ``each`` largest allocations at phases' peaks that are not alive at the run's peak, largest first.

        For every phase, the ``spans`` stretches with the highest peaks are examined.
        """
        by_phase: dict[str, list[Breakdown]] = {}
        for breakdown in self.phases:
            by_phase.setdefault(breakdown.phase, []).append(breakdown)
        found: set[int] = set()
        for stretches in by_phase.values():
            for breakdown in sorted(stretches, key=lambda b: -b.active_bytes)[:spans]:
                found.update(int(row) for row in self._largest(breakdown.rows, each))
        found.difference_update(int(row) for row in self.peak.rows)
        rows = np.array(sorted(found), dtype=np.int64)
        return tuple(self.allocation(int(row)) for row in self._largest(rows, None))

    def _largest(self, rows: I64, top: int | None) -> I64:
        order = np.argsort(-self.timeline.size[rows], kind="stable")
        return rows[order[:top]]

    def series(self, max_points: int = 4000) -> Series:
        """Return the stacked timeline at about ``max_points`` instants (see :mod:`memprof.analysis.curves`)."""
        from memprof.analysis.curves import build_series

        peak, missing = self.peak.instant, self.peak.not_in_history_bytes
        return build_series(self.timeline, self.attribution, max_points, peak, missing)


def _code_of(category: str) -> int:
    try:
        return Category(category).code
    except ValueError:
        meant = did_you_mean(category, list(Category))
        raise UsageError(f"no category {category!r}{meant}; there are: {', '.join(Category)}.") from None
