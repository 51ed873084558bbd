"""Find where segments, blocks and free memory lie at one instant, and what the reserved memory without blocks is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from memprof.snapshot.model import I64, distinct
from memprof.timeline.timeline import Timeline


@dataclass(frozen=True)
class SegmentLayout:
    """Hold the segments at one instant, by address, with the blocks and the free pieces in them. Sizes are in bytes.

    Neighbouring stretches of an expandable segment that are mapped are one segment here.

    Segment columns: ``address``; ``size``; ``stream``; ``pool``, which indexes ``snapshot.pools``, 0 for the default
    pool; ``page``, 0 for ordinary segments; ``used``, the bytes of its blocks.

    Block columns, by address: ``rows`` of the timeline; ``segment``, the segment that each lies in. Blocks outside
    every known segment are missing.

    Columns of the free pieces, by address: ``free_address``; ``free_size``; ``free_segment``.
    """

    address: I64
    size: I64
    stream: I64
    pool: I64
    page: I64
    used: I64
    rows: I64
    segment: I64
    free_address: I64
    free_size: I64
    free_segment: I64

    def __len__(self) -> int:
        return len(self.address)

    @property
    def idle(self) -> I64:
        """Return the bytes of each segment that no block uses."""
        idle: I64 = np.maximum(self.size - self.used, 0)
        return idle

    @property
    def unused_pages(self) -> I64:
        """Return of each free piece the bytes in whole pages of its expandable segment; 0 in ordinary ones."""
        page = np.maximum(self.page[self.free_segment], 1)
        begin = self.free_address - self.address[self.free_segment]
        whole = np.maximum((begin + self.free_size) // page - -(-begin // page), 0) * page
        return np.where(self.page[self.free_segment] > 0, whole, 0)


def layout_at(timeline: Timeline, instant: int) -> SegmentLayout:
    """Return the layout at an instant; without segments where the allocator recorded none."""
    regions = timeline.regions
    there = regions.alive_at(instant)
    address, size = regions.address[there], regions.size[there]
    stream, page, pool = regions.stream[there], regions.page[there], regions.pool[there].astype(np.int64)
    joined = (page[1:] > 0) & (page[:-1] > 0) & (address[1:] == address[:-1] + size[:-1]) & (pool[1:] == pool[:-1])
    head = np.flatnonzero(np.concatenate([[True], ~joined])) if len(there) else there
    start, total = address[head], np.add.reduceat(size, head) if len(there) else size
    live = timeline.alive_at(instant)
    live = live[np.argsort(timeline.address[live], kind="stable")]
    if len(there):
        at = np.searchsorted(start, timeline.address[live], side="right") - 1
        inside = (at >= 0) & (timeline.address[live] < (start + total)[np.maximum(at, 0)])
        live, at = live[inside], at[inside]
    else:
        live = at = live[:0]
    used = np.bincount(at, timeline.size[live], len(start)).astype(np.int64)
    free = _free_pieces(start, total, at, timeline.address[live], timeline.size[live])
    return SegmentLayout(start, total, stream[head], pool[head], page[head], used, live, at, *free)


def _free_pieces(start: I64, total: I64, segment: I64, address: I64, size: I64) -> tuple[I64, I64, I64]:
    """Return address, size and segment of what lies between the blocks, which come by address."""
    end, limit = address + size, start + total
    new = np.diff(segment, prepend=-1) != 0
    # In front of each block, and behind the last of each segment; a segment without blocks is one piece.
    before = np.where(new, start[segment], np.concatenate([end[:1], end[:-1]]))
    behind = start.copy()
    last = np.flatnonzero(np.diff(segment, append=-1) != 0)
    behind[segment[last]] = end[last]
    begin, stop = np.concatenate([before, behind]), np.concatenate([address, limit])
    of = np.concatenate([segment, np.arange(len(start))])
    order = np.argsort(begin, kind="stable")
    order = order[(stop - begin)[order] > 0]
    return begin[order], (stop - begin)[order], of[order]


def idle_memory(timeline: Timeline) -> Callable[[int], dict[str, int]]:
    """Return a function of an instant that splits reserved − active bytes.

    Its keys are ``cached`` (segments, or whole pages of expandable ones, that hold no block),
    ``inactive_split`` (free parts of segments in use: fragmentation) and ``private_pools`` (free
    memory of CUDA graphs' and engines' pools, which nothing else can use). The three add up to
    ``reserved - active`` bytes exactly; all are 0 for a tensor trace.
    """

    def split(instant: int) -> dict[str, int]:
        if timeline.reserved is None:
            return {"cached": 0, "inactive_split": 0, "private_pools": 0}
        idle = int(timeline.reserved[instant] - timeline.active[instant])
        private, cached = _idle(layout_at(timeline, instant))
        # Blocks outside every known segment (foreign allocators) can make the parts exceed the sum.
        private = min(private, max(idle, 0))
        cached = min(cached, max(idle, 0) - private)
        return {"cached": cached, "inactive_split": idle - private - cached, "private_pools": private}

    return split


def idle_pools(timeline: Timeline, instant: int) -> dict[int, tuple[int, int]]:
    """Return for each private pool its bytes and how many of them no block uses, at an instant.

    Keys index ``snapshot.pools``. Only the CUDA graphs or the engine that the pool belongs to can use what is free.
    """
    layout = layout_at(timeline, instant)
    found = {}
    for pool in distinct(layout.pool[layout.pool != 0]).tolist():
        mine = layout.pool == pool
        found[int(pool)] = (int(layout.size[mine].sum()), int(layout.idle[mine].sum()))
    return found


def _idle(layout: SegmentLayout) -> tuple[int, int]:
    """Return the free bytes in private pools, and in the other pools' wholly free segments and pages."""
    own, empty = layout.pool != 0, layout.used == 0
    pages = layout.unused_pages[(~own & ~empty)[layout.free_segment]]
    return int(layout.idle[own].sum()), int(layout.idle[~own & empty].sum() + pages.sum())
