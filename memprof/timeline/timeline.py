"""Rebuild the allocation lifetimes of one device from its trace and its final state.

Instant ``k`` is the state after the first ``k`` events, ``0 <= k <= n_events``. A row is alive at ``k`` when
``alloc_event < k <= free_event``. Blocks older than the first event ("ghosts") have ``alloc_event == -1``;
rows still alive at the end have ``free_event == n_events``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from memprof.allocator.settings import settings_of
from memprof.errors import InputError
from memprof.snapshot.model import I32, I64, Action, Blocks, Segments, Snapshot, Trace, distinct, signed
from memprof.timeline.block_sizes import row_sizes
from memprof.timeline.lifetimes import LifetimeColumns, pair_blocks
from memprof.timeline.reserved import Regions, add_pools, regions_of
from memprof.vocabulary import History, Kind

if TYPE_CHECKING:
    from memprof.allocator.replay import Program

# Rows in a part of a timeline; any number gives the same answers.
_PART = 4096
# Columns of rows that ``size`` and ``requested`` are made of.
_SIZES = ("trace_size", "block_size", "block_requested")


@dataclass(frozen=True)
class Timeline:
    """Hold one row per allocation lifetime, in order of birth, and the running totals.

    Row columns: ``address``; ``size`` (block bytes, which the device holds); ``requested`` bytes;
    ``alloc_event``, ``release_event`` (free_requested) and ``free_event`` (free_completed), by the module's
    convention for instants; ``born_us`` and ``died_us`` in microseconds (``died_us`` is -1 while alive);
    ``stream``; ``pool``, ``stack`` and ``metadata``, which index the snapshot's tables.

    Totals have shape ``[n_events + 1]``, one entry per instant, in bytes: ``active`` (blocks whose free has not
    completed), ``allocated`` (blocks the program holds), ``requested_total`` (requested bytes of active blocks) and
    ``reserved`` (segments; None for a tensor trace). ``regions`` are the segments over time. ``history`` tells how
    much of the run the events cover.
    """

    device: int
    n_events: int
    event_us: I64
    address: I64
    size: I64
    requested: I64
    alloc_event: I64
    release_event: I64
    free_event: I64
    born_us: I64
    died_us: I64
    stream: I64
    pool: I32
    stack: I32
    metadata: I32
    active: I64
    allocated: I64
    requested_total: I64
    reserved: I64 | None
    oom_events: I64
    regions: Regions
    history: History = History.NONE
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.address)

    def saved_without(self, rows: I64, since: I64) -> int:
        """Return how much lower the highest active bytes were if each of ``rows`` were gone from an event on."""
        change = np.zeros(self.n_events + 2, np.int64)
        np.add.at(change, since + 1, self.size[rows])
        np.add.at(change, np.minimum(self.free_event[rows], self.n_events) + 1, -self.size[rows])
        return int(self.active.max() - (self.active - np.cumsum(change)[: len(self.active)]).max())

    def alive_at(self, instant: int) -> NDArray[np.int64]:
        """Return the rows alive (active) at ``instant``, in order of birth."""
        born = int(np.searchsorted(self.alloc_event, instant))
        parts = np.flatnonzero(self._last_free[: -(-born // _PART)] >= instant)
        rows: NDArray[np.int64] = (parts[:, None] * _PART + np.arange(_PART)).reshape(-1)
        rows = rows[: np.searchsorted(rows, born)]
        return rows[self.free_event[rows] >= instant]

    @cached_property
    def _last_free(self) -> I64:
        """Return of each part of the rows the last ``free_event``: few parts have a row that is alive at an instant."""
        return np.maximum.reduceat(self.free_event, np.arange(0, len(self), _PART)) if len(self) else self.free_event

    def row_at(self, address: int, instant: int) -> int | None:
        """Return the row alive at ``instant`` whose block begins at ``address``; None where there is none."""
        alive = (self.address == signed([address])) & (self.alloc_event < instant) & (instant <= self.free_event)
        found = np.flatnonzero(alive)
        return int(found[0]) if len(found) else None

    def time_us(self, instant: int) -> int:
        """Return when ``instant`` began, in microseconds: the time of the event that led to it (0 without events)."""
        if not self.n_events:
            return 0
        return int(self.event_us[max(instant - 1, 0)])

    def times_us(self, instants: I64) -> I64:
        """Return what :meth:`time_us` returns for each instant."""
        if not self.n_events:
            return np.zeros(len(instants), np.int64)
        return self.event_us[np.maximum(instants - 1, 0)]

    def instant_at(self, time_us: int) -> int:
        """Return the instant at ``time_us``: the state after every event up to and including that time."""
        return int(np.searchsorted(self.event_us, time_us, side="right"))

    def program(self) -> Program:
        """Return what was asked of the allocator, in a form that its model runs again under other settings."""
        from memprof.allocator.replay import Program

        gone = distinct(self.regions.end_event)
        gone = gone[gone < self.n_events]
        return Program(
            requested=self.requested,
            address=self.address,
            born=self.alloc_event,
            died=self.free_event,
            stream=self.stream,
            pool=self.pool.astype(np.int64),
            flushed=gone[np.diff(gone, prepend=-2) > 1],  # one flush gives back many segments, one event each
            end=self.n_events,
        )

    @property
    def peak_instant(self) -> int:
        """Return the first instant at which ``allocated`` is highest."""
        return int(np.argmax(self.allocated))

    @property
    def max_requested(self) -> int:
        """Return the highest total of requested bytes."""
        return int(self.requested_total.max())


def build_timeline(snapshot: Snapshot, device: int | None = None) -> Timeline:
    """Build the timeline of ``device`` (default: the one that ran out of memory, else that with the highest peak).

    Raises:
        InputError: the snapshot holds nothing about that device, or nothing at all.
    """
    devices = snapshot.devices
    name = snapshot.path or "the snapshot"
    if not devices:
        raise InputError(f"{name}: has no events and no segments; was recording enabled before it was written?")
    if device is None and (device := _failed_device(snapshot)) is None:
        lines = [build_timeline(snapshot, d) for d in devices]
        return max(lines, key=lambda t: t.max_requested)
    if device not in devices:
        raise InputError(f"{name}: has nothing on device {device}; it has {', '.join(map(str, devices))}.")
    trace = snapshot.traces.get(device) or _no_events()
    blocks, segments = snapshot.blocks.get(device), snapshot.segments.get(device)
    notes: list[str] = []
    settings = settings_of(snapshot.settings)
    notes += settings.notes
    rows = pair_blocks(trace, blocks, segments, notes)
    regions = regions_of(trace if snapshot.kind is not Kind.TRACE else _no_events(), segments, settings)
    add_pools(rows, trace, regions)
    sizes = row_sizes(rows, snapshot.kind, settings, regions, notes)
    _note_strays(rows, blocks, len(trace), notes)
    timeline = _totals(device, snapshot.kind, trace, segments, regions, rows, sizes, notes)
    timeline = replace(timeline, history=_history(snapshot, device, trace, rows))
    _note_capacity(timeline, snapshot, notes)
    return timeline


def _failed_device(snapshot: Snapshot) -> int | None:
    """Return the one device on which an allocation failed for good; None where none did, or several."""
    if len(snapshot.devices) < 2:
        return None
    failed = []
    for device in snapshot.devices:
        trace = snapshot.traces.get(device) or _no_events()
        times = trace.time_us[trace.action == Action.OOM]
        if len(times) and not snapshot.survived(int(times.max())):
            failed.append(device)
    return failed[0] if len(failed) == 1 else None


def _no_events() -> Trace:
    none64, none32 = np.empty(0, np.int64), np.empty(0, np.int32)
    return Trace(none64.astype(np.uint8), none64, none64, none64, none64, none32, none32, none32, False)


def _note_strays(rows: LifetimeColumns, blocks: Blocks | None, count: int, notes: list[str]) -> None:
    """Add a note where blocks that were never freed are missing from the final state."""
    if blocks is None or not len(blocks):
        return
    strays = (rows.free_event == count) & (rows.block_size < 0)
    if np.any(strays):
        notes.append(
            f"{np.count_nonzero(strays)} blocks ({rows.trace_size[strays].sum():,} bytes) were never freed "
            "but are missing from the final state; they are counted as alive"
        )


def _note_capacity(timeline: Timeline, snapshot: Snapshot, notes: list[str]) -> None:
    """Add a note where torch counts more than the device has, as it does while an engine sleeps."""
    total = snapshot.device_facts(timeline.device).total_bytes
    if timeline.reserved is None or not total:
        return
    most = int(timeline.reserved.max())
    if most > total and snapshot.kind is Kind.SIMULATED:
        notes.append(f"The run would reserve {most:,} bytes, more than the device's {total:,}.")
    elif most > total:
        notes.append(
            f"torch counts {most:,} bytes reserved at most, more than the device's {total:,}: a pluggable "
            "allocator (an engine's sleep mode) has given memory back that torch still counts"
        )


def _totals(
    device: int,
    kind: Kind,
    trace: Trace,
    segments: Segments | None,
    regions: Regions,
    rows: LifetimeColumns,
    sizes: tuple[I64, I64],
    notes: list[str],
) -> Timeline:
    requested, size = sizes
    active = _running(size, rows.alloc_event, rows.free_event, len(trace))
    reserved = None if kind is Kind.TRACE else _reserved(trace, segments)
    if reserved is not None and np.any(reserved < active):
        notes.append("the blocks in use exceed the recorded segments; reserved bytes are raised to match")
        reserved = np.maximum(reserved, active)
    count = len(trace)
    event_us = np.maximum.accumulate(trace.time_us) if count else trace.time_us
    died = np.full(len(rows.address), -1, np.int64)
    ended = rows.free_event < count
    died[ended] = event_us[rows.free_event[ended]]
    born = np.full(len(rows.address), event_us[0] if count else 0, np.int64)
    seen = rows.alloc_event >= 0
    born[seen] = event_us[rows.alloc_event[seen]]
    return Timeline(
        device=device,
        n_events=count,
        event_us=event_us,
        size=size,
        requested=requested,
        born_us=born,
        died_us=died,
        **{name: column for name, column in vars(rows).items() if name not in _SIZES},
        active=active,
        allocated=_running(size, rows.alloc_event, rows.release_event, count),
        requested_total=_running(requested, rows.alloc_event, rows.free_event, count),
        reserved=reserved,
        oom_events=np.flatnonzero(trace.action == Action.OOM),
        regions=regions,
        notes=notes,
    )


def _running(size: I64, begin: I64, end: I64, count: int) -> I64:
    """Return the sum of ``size`` over the rows alive at each instant, shape ``[count + 1]``.

    A row that ends before it begins is never alive.
    """
    change = np.zeros(count + 2, np.int64)
    lives = begin < end
    np.add.at(change, begin[lives] + 1, size[lives])
    np.subtract.at(change, end[lives] + 1, size[lives])
    return np.cumsum(change)[: count + 1]


def _reserved(trace: Trace, segments: Segments | None) -> I64:
    """Return the bytes of segments at each instant, counted backwards from their sum at the end."""
    sign = np.zeros(Action.UNKNOWN + 1, np.int64)
    sign[[Action.SEGMENT_ALLOC, Action.SEGMENT_MAP]] = 1
    sign[[Action.SEGMENT_FREE, Action.SEGMENT_UNMAP]] = -1
    after = np.concatenate([[0], np.cumsum(sign[trace.action] * trace.size)])
    total = int(segments.total.sum()) if segments is not None else int(after[-1] - after.min())
    reserved: I64 = after + (total - after[-1])
    return reserved


def _history(snapshot: Snapshot, device: int, trace: Trace, rows: LifetimeColumns) -> History:
    """Tell how much of the run the snapshot's events cover.

    The recorder's own note about that device wins. Without one: ``none`` where there are no events; ``complete`` where
    no block is older than the first event; ``truncated`` where the number of the device's events is that of a full ring
    buffer (the oldest were overwritten); otherwise ``started_late``, as recording began with memory in use.
    """
    recorded = snapshot.device_facts(device).history
    if recorded is None and snapshot.recorder_asked_about(device):
        recorded = snapshot.run.recorded.history
    if recorded is not None:
        return recorded
    if not np.any(trace.action <= Action.FREE_COMPLETED):
        return History.NONE
    if not np.any(rows.alloc_event < 0):
        return History.COMPLETE
    return History.TRUNCATED if _is_ring_size(len(trace)) else History.STARTED_LATE


def _is_ring_size(count: int) -> bool:
    """Tell whether this is a number that a person would type as ``max_entries``."""
    digits = str(count).rstrip("0")
    return count >= 1000 and ((len(digits) <= 2 and count % 1000 == 0) or count & (count - 1) == 0)
