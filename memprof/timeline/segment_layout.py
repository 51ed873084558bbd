"""Find where segments, blocks and free memory lie in the device's addresses at one instant."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.snapshot.model import I64
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
