"""Pair each alloc event with the free that ends it, and with the final blocks: one row per lifetime.

With events sorted by address and then by time, the event after an alloc ends it. A free without an alloc
before it, and a final block that no event made, belong to a "ghost": a block older than the first event.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.snapshot.model import I32, I64, U8, Action, Blocks, BlockState, Segments, Trace, order_by_event, order_of


@dataclass
class LifetimeColumns:
    """Hold the columns of rows while they are built; sizes are bytes.

    ``block_size`` and ``block_requested`` are -1 where no final block is known.
    """

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

    def joined(self, other: LifetimeColumns) -> LifetimeColumns:
        """Return these rows followed by the other's."""
        mine, theirs = vars(self), vars(other)
        return LifetimeColumns(**{name: np.concatenate([mine[name], theirs[name]]) for name in mine})

    def take(self, order: I64) -> None:
        """Reorder or choose rows, in place."""
        for name, column in vars(self).items():
            setattr(self, name, column[order])


_PAD = np.iinfo(np.int64).min


@dataclass(frozen=True)
class _ByAddress:
    """Hold alloc and free events by address, then time, with one sentinel at each end of every column."""

    action: U8
    address: I64
    event: I64

    @classmethod
    def of(cls, trace: Trace) -> _ByAddress:
        """Sort a trace's alloc and free events."""
        event = np.flatnonzero(trace.action <= Action.FREE_COMPLETED)
        event = event[order_of(trace.address[event])]
        return cls(
            np.concatenate([[255], trace.action[event], [255]], dtype=np.uint8, casting="unsafe"),
            np.concatenate([[_PAD], trace.address[event], [_PAD]]),
            np.concatenate([[-1], event, [len(trace)]]),
        )

    def take(self, at: I64) -> _ByAddress:
        """Return the entries at ``at``, again between sentinels."""
        at = np.concatenate([[0], at, [len(self.action) - 1]])
        return _ByAddress(self.action[at], self.address[at], self.event[at])

    def requested_before(self, at: I64, otherwise: I64) -> I64:
        """Return the events that requested the completed frees at ``at``; ``otherwise`` where there is none."""
        before = (self.action[at - 1] == Action.FREE_REQUESTED) & (self.address[at - 1] == self.address[at])
        return np.where(before, self.event[at - 1], otherwise)

    def requested_after(self, at: I64) -> I64:
        """Return the events that requested to free the allocs at ``at``; the end of the trace without one."""
        after = (self.action[at + 1] == Action.FREE_REQUESTED) & (self.address[at + 1] == self.address[at])
        return np.where(after, self.event[at + 1], self.event[-1])


def pair_blocks(trace: Trace, blocks: Blocks | None, segments: Segments | None, notes: list[str]) -> LifetimeColumns:
    """Match every alloc with the free that ends it, and the rest with the final blocks.

    A free without an alloc before it, and a final block without any event, become rows with
    ``alloc_event == -1``. Contradictions in the trace are counted in ``notes``.
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
    requested = place[born + 1][completed]
    release_event[completed] = every.requested_before(requested, every.event[requested])

    freed = np.flatnonzero(ends.action == Action.FREE_COMPLETED)
    orphan = freed[~(is_alloc[freed - 1] & (ends.address[freed - 1] == ends.address[freed]))]
    twice = ends.address[orphan - 1] == ends.address[orphan]
    # A trace that begins between a request and its completion shows a block that was pending, no longer allocated. A
    # trace whose recorder skipped the requests does not show when blocks were freed: blocks made in it go without one.
    any_request = bool(np.any(every.action == Action.FREE_REQUESTED))
    tells_requests = any_request or not np.any(completed)
    unrequested = np.where(tells_requests & ~twice, -1, ends.event[orphan])
    if tells_requests and not any_request and (pending := np.count_nonzero(~twice)):
        notes.append(
            f"the trace completes {pending} frees and shows no request to free: these blocks count as pending from its "
            "start, and were allocated until then if its recorder skipped the requests"
        )
    index = ends.event[np.concatenate([born, orphan])]
    known = np.arange(len(index)) < len(born)
    rows = LifetimeColumns(
        address=trace.address[index],
        trace_size=trace.size[index],
        block_size=np.full(len(index), -1, np.int64),
        block_requested=np.full(len(index), -1, np.int64),
        alloc_event=np.concatenate([ends.event[born], np.where(twice, ends.event[orphan - 1], -1)]),
        release_event=np.concatenate([release_event, every.requested_before(place[orphan], unrequested)]),
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
    rows.take(order_by_event(rows.address, rows.alloc_event, n_events=len(trace)))
    return rows


def _join_blocks(
    rows: LifetimeColumns, every: _ByAddress, ends: _ByAddress, blocks: Blocks, segments: Segments, notes: list[str]
) -> LifetimeColumns:
    """Give rows alive at the end their final block, and add a row for each block no event made."""
    active = np.flatnonzero(blocks.state != BlockState.INACTIVE)
    address = blocks.address[active]
    count = int(every.event[-1])
    inner = ends.address[1:-1]
    last = np.searchsorted(inner, address, side="right") - 1  # the last alloc or free at each address
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
    ghosts = LifetimeColumns(
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
