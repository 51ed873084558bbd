"""Allocation lifetimes of one device, rebuilt from its trace and its final state.

Instants: ``k`` is the state after the first ``k`` events, ``0 <= k <= n_events``. A row is alive at
``k`` when ``alloc_event < k <= free_event``. Blocks that were there before the first event
("ghosts") have ``alloc_event == -1``; what is still alive at the end has ``free_event == n_events``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memprof.errors import InputError
from memprof.snapshot.model import I32, I64, U8, Action, Blocks, BlockState, Segments, Snapshot, Trace
from memprof.vocabulary import Kind

__all__ = ["Timeline", "build_timeline"]


@dataclass(frozen=True)
class Timeline:
    """One row per allocation lifetime, and the running totals.

    Row columns: ``address``; ``size`` (block bytes, what the device holds); ``requested`` bytes;
    ``alloc_event``, ``release_event`` (free_requested) and ``free_event`` (free_completed), see the
    module's convention for instants; ``born_us``/``died_us`` (``died_us`` is -1 while alive);
    ``stream``, ``pool``, ``stack`` and ``metadata`` index the snapshot's tables.

    Totals have ``n_events + 1`` entries, one an instant: ``active`` = bytes whose free has not
    completed, ``allocated`` = bytes the program holds, ``requested_total`` = live requested bytes,
    ``reserved`` = bytes of segments (None for a tensor trace).
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
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.address)

    def alive_at(self, instant: int) -> NDArray[np.int64]:
        """Rows alive (active) at ``instant``, in order of birth."""
        return np.flatnonzero((self.alloc_event < instant) & (instant <= self.free_event))

    def time_us(self, instant: int) -> int:
        """When ``instant`` began: the time of the event that led to it (0 without events)."""
        if not self.n_events:
            return 0
        return int(self.event_us[max(instant - 1, 0)])

    def instant_at(self, time_us: int) -> int:
        """The state at ``time_us``: after every event up to and including that time."""
        return int(np.searchsorted(self.event_us, time_us, side="right"))

    @property
    def peak_instant(self) -> int:
        """First instant of the highest ``allocated``."""
        return int(np.argmax(self.allocated))

    @property
    def max_requested(self) -> int:
        """The highest sum of live requested bytes."""
        return int(self.requested_total.max())


def build_timeline(snapshot: Snapshot, device: int | None = None) -> Timeline:
    """Lifetimes on ``device`` (default: the one with the highest peak of requested bytes).

    Raises:
        InputError: the snapshot holds nothing about that device, or nothing at all.
    """
    devices = snapshot.devices
    name = snapshot.path or "the snapshot"
    if not devices:
        raise InputError(f"{name}: holds no event and no segment; was recording enabled before it was written?")
    if device is None:
        lines = [build_timeline(snapshot, d) for d in devices]
        return max(lines, key=lambda t: t.max_requested)
    if device not in devices:
        raise InputError(f"{name}: has nothing on device {device}; it has {', '.join(map(str, devices))}.")
    trace = snapshot.traces.get(device) or _no_events()
    blocks, segments = snapshot.blocks.get(device), snapshot.segments.get(device)
    notes: list[str] = []
    rows = _pair(trace, blocks, segments, notes)
    _add_sizes(rows, trace, snapshot.kind, notes)
    return _totals(device, snapshot.kind, trace, segments, rows, notes)


def _no_events() -> Trace:
    none64, none32 = np.empty(0, np.int64), np.empty(0, np.int32)
    return Trace(none64.astype(np.uint8), none64, none64, none64, none64, none32, none32, none32, False)


@dataclass
class _Rows:
    """Rows under construction; ``block_size``/``block_requested`` are -1 where no final block is known."""

    address: I64
    trace_size: I64
    block_size: I64
    block_requested: I64
    alloc_event: I64
    release_event: I64
    free_event: I64
    stream: I64
    pool: I32
    stack: I32
    metadata: I32
    size: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    requested: I64 = field(default_factory=lambda: np.empty(0, np.int64))

    def joined(self, other: _Rows) -> _Rows:
        """These rows and then the other's."""
        mine, theirs = vars(self), vars(other)
        return _Rows(**{name: np.concatenate([mine[name], theirs[name]]) for name in mine})

    def take(self, order: I64) -> None:
        """Reorder or choose rows."""
        for name, column in vars(self).items():
            if len(column):
                setattr(self, name, column[order])


_PAD = np.iinfo(np.int64).min


@dataclass(frozen=True)
class _ByAddress:
    """Alloc and free events sorted by address, then time; one sentinel at each end of every column."""

    action: U8
    address: I64
    event: I64

    @classmethod
    def of(cls, trace: Trace) -> _ByAddress:
        event = np.flatnonzero(trace.action <= Action.FREE_COMPLETED)
        event = event[np.argsort(trace.address[event], kind="stable")]
        return cls(
            np.concatenate([[255], trace.action[event], [255]]).astype(np.uint8),
            np.concatenate([[_PAD], trace.address[event], [_PAD]]),
            np.concatenate([[-1], event, [len(trace)]]),
        )

    def take(self, at: I64) -> _ByAddress:
        """The entries at ``at``, between sentinels again."""
        at = np.concatenate([[0], at, [len(self.action) - 1]])
        return _ByAddress(self.action[at], self.address[at], self.event[at])

    def requested_before(self, at: I64) -> I64:
        """When the completed frees at ``at`` were requested; themselves where that was not recorded."""
        before = (self.action[at - 1] == Action.FREE_REQUESTED) & (self.address[at - 1] == self.address[at])
        return np.where(before, self.event[at - 1], self.event[at])

    def requested_after(self, at: I64) -> I64:
        """When the allocs at ``at``, never freed, were asked to be; the end of the trace where never."""
        after = (self.action[at + 1] == Action.FREE_REQUESTED) & (self.address[at + 1] == self.address[at])
        return np.where(after, self.event[at + 1], self.event[-1])


def _pair(trace: Trace, blocks: Blocks | None, segments: Segments | None, notes: list[str]) -> _Rows:
    """Match every alloc with the free that ends it, and what is left over with the final blocks.

    Sorted by address and then by time, an alloc is ended by its neighbour. A free with no alloc
    before it, and a final block with no event at all, were there before the first event.
    """
    every = _ByAddress.of(trace)
    place = np.flatnonzero((every.action == Action.ALLOC) | (every.action == Action.FREE_COMPLETED))
    ends = every.take(place)
    place = np.concatenate([[0], place, [len(every.action) - 1]])
    is_alloc = ends.action == Action.ALLOC

    born = np.flatnonzero(is_alloc)
    ended = ends.address[born + 1] == ends.address[born]
    completed = ended & ~is_alloc[born + 1]
    free_event = np.where(ended, ends.event[born + 1], len(trace))
    release_event = np.where(ended, free_event, every.requested_after(place[born]))
    release_event[completed] = every.requested_before(place[born + 1][completed])

    freed = np.flatnonzero(ends.action == Action.FREE_COMPLETED)
    orphan = freed[~(is_alloc[freed - 1] & (ends.address[freed - 1] == ends.address[freed]))]
    twice = ends.address[orphan - 1] == ends.address[orphan]
    index = ends.event[np.concatenate([born, orphan])]
    known = np.arange(len(index)) < len(born)
    rows = _Rows(
        address=trace.address[index],
        trace_size=trace.size[index],
        block_size=np.full(len(index), -1, np.int64),
        block_requested=np.full(len(index), -1, np.int64),
        alloc_event=np.concatenate([ends.event[born], np.where(twice, ends.event[orphan - 1], -1)]),
        release_event=np.concatenate([release_event, every.requested_before(place[orphan])]),
        free_event=np.concatenate([free_event, ends.event[orphan]]),
        stream=trace.stream[index],
        pool=trace.pool[index],
        stack=np.where(known, trace.stack[index], 0).astype(np.int32),
        metadata=np.where(known, trace.metadata[index], 0).astype(np.int32),
    )
    if blocks is not None and segments is not None:
        rows = _join_blocks(rows, every, ends, blocks, segments, notes)
    lost = int(np.count_nonzero(ended & is_alloc[born + 1]))
    if lost or np.any(twice):
        notes.append(f"the trace contradicts itself: {lost} frees and {np.count_nonzero(twice)} allocs are missing")
    rows.take(np.lexsort((rows.address, rows.alloc_event)))
    return rows


def _join_blocks(
    rows: _Rows, every: _ByAddress, ends: _ByAddress, blocks: Blocks, segments: Segments, notes: list[str]
) -> _Rows:
    """Give rows alive at the end their final block, and add a row for each block no event made."""
    active = np.flatnonzero(blocks.state != BlockState.INACTIVE)
    address = blocks.address[active]
    count = int(every.event[-1])
    inner = ends.address[1:-1]
    last = np.searchsorted(inner, address, side="right") - 1  # the last alloc or free at that address
    seen = (last >= 0) & (inner[last] == address) if len(inner) else np.zeros(len(address), np.bool_)
    last = np.where(seen, last + 1, 0)
    is_alloc = ends.action == Action.ALLOC
    made = seen & is_alloc[last]
    row = (np.cumsum(is_alloc) - 1)[last[made]]  # rows begin with the allocs, in this order
    rows.block_size[row] = blocks.size[active[made]]
    rows.block_requested[row] = blocks.requested[active[made]]
    rows.pool[row] = segments.pool[blocks.segment[active[made]]]

    rest = active[~made]
    first = np.searchsorted(every.address[1:-1], address[~made]) + 1
    asked = ~seen[~made] & (every.address[first] == address[~made]) & (every.action[first] == Action.FREE_REQUESTED)
    pending = np.where(blocks.state[rest] == BlockState.PENDING_FREE, -1, count)
    ghosts = _Rows(
        address=blocks.address[rest],
        trace_size=np.full(len(rest), -1, np.int64),
        block_size=blocks.size[rest],
        block_requested=blocks.requested[rest],
        alloc_event=np.where(seen[~made], ends.event[last[~made]], -1),
        release_event=np.where(asked, every.event[first], pending),
        free_event=np.full(len(rest), count, np.int64),
        stream=segments.stream[blocks.segment[rest]],
        pool=segments.pool[blocks.segment[rest]],
        stack=blocks.stack[rest],
        metadata=np.zeros(len(rest), np.int32),
    )
    if np.any(seen[~made]):
        notes.append(f"{np.count_nonzero(seen[~made])} blocks are in use at the end although the trace freed them")
    return rows.joined(ghosts)


def _add_sizes(rows: _Rows, trace: Trace, kind: Kind, notes: list[str]) -> None:
    """Requested and block bytes of every row, see the module's text on what the trace's sizes mean."""
    if kind is Kind.TRACE:
        rows.requested = np.where(rows.trace_size >= 0, rows.trace_size, rows.block_requested)
        rows.size = rows.requested
        return
    both = (rows.trace_size >= 0) & (rows.block_size >= 0)
    as_requested = np.count_nonzero(rows.trace_size[both] == rows.block_requested[both])
    as_block = np.count_nonzero(rows.trace_size[both] == rows.block_size[both])
    known = rows.block_size >= 0
    rows.requested = np.where(known, rows.block_requested, rows.trace_size)
    rounded = rows.trace_size if as_block > as_requested else np.maximum(-(-rows.trace_size // 512) * 512, 512)
    rows.size = np.where(known, rows.block_size, rounded)
    if as_block > as_requested:
        notes.append("the trace holds block sizes: the requested size of what was freed in it is not known")


def _totals(
    device: int, kind: Kind, trace: Trace, segments: Segments | None, rows: _Rows, notes: list[str]
) -> Timeline:
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
        address=rows.address,
        size=rows.size,
        requested=rows.requested,
        alloc_event=rows.alloc_event,
        release_event=rows.release_event,
        free_event=rows.free_event,
        born_us=born,
        died_us=died,
        stream=rows.stream,
        pool=rows.pool,
        stack=rows.stack,
        metadata=rows.metadata,
        active=_running(rows.size, rows.alloc_event, rows.free_event, count),
        allocated=_running(rows.size, rows.alloc_event, rows.release_event, count),
        requested_total=_running(rows.requested, rows.alloc_event, rows.free_event, count),
        reserved=None if kind is Kind.TRACE else _reserved(trace, segments),
        oom_events=np.flatnonzero(trace.action == Action.OOM),
        notes=notes,
    )


def _running(size: I64, begin: I64, end: I64, count: int) -> I64:
    """The sum of ``size`` over what lives at each instant; a row that ends before it begins never lives."""
    change = np.zeros(count + 2, np.int64)
    lives = begin < end
    np.add.at(change, begin[lives] + 1, size[lives])
    np.subtract.at(change, end[lives] + 1, size[lives])
    return np.cumsum(change)[: count + 1]


def _reserved(trace: Trace, segments: Segments | None) -> I64:
    """Bytes of segments at each instant, from their sum at the end backwards."""
    sign = np.zeros(Action.UNKNOWN + 1, np.int64)
    sign[[Action.SEGMENT_ALLOC, Action.SEGMENT_MAP]] = 1
    sign[[Action.SEGMENT_FREE, Action.SEGMENT_UNMAP]] = -1
    after = np.concatenate([[0], np.cumsum(sign[trace.action] * trace.size)])
    total = int(segments.total.sum()) if segments is not None else int(after[-1] - after.min())
    return after + (total - after[-1])
