"""Memory the allocator held of the device: which stretches, when, and how much of them lay idle.

A region is a segment, or one stretch of an expandable segment between two places where pages were
ever mapped or unmapped; each has one row per lifetime, by the timeline's convention for instants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from memprof.snapshot.model import I32, I64, Action, Segments, Snapshot, Trace

if TYPE_CHECKING:
    from memprof.timeline import Timeline

__all__ = ["Regions", "regions_of", "reserved_splitter"]

_PAGE_SMALL, _PAGE_LARGE = 2 * 2**20, 20 * 2**20
# A hostile file can make every unmap span every map; real ones stay near one stretch an event.
_STRETCHES_EACH, _STRETCHES_FREE = 8, 1_000_000


@dataclass(frozen=True)
class Regions:
    """Rows by address, then time. ``page`` is 0 for ordinary segments, which come and go whole."""

    address: I64
    size: I64
    begin_event: I64
    end_event: I64
    pool: I32
    page: I64

    def __len__(self) -> int:
        return len(self.address)

    def alive_at(self, instant: int) -> I64:
        """Rows there at ``instant``, by address."""
        return np.flatnonzero((self.begin_event < instant) & (instant <= self.end_event))


def regions_of(trace: Trace, segments: Segments | None) -> Regions:
    """Every region that existed between the first event and the last."""
    final = segments if segments is not None else _no_segments()
    whole = _lifetimes(trace, final, Action.SEGMENT_ALLOC, Action.SEGMENT_FREE, expandable=False)
    paged = _lifetimes(trace, final, Action.SEGMENT_MAP, Action.SEGMENT_UNMAP, expandable=True)
    parts = [np.concatenate([a, b]) for a, b in zip(whole, paged, strict=True)]
    order = np.lexsort((parts[2], parts[0]))
    address, size, begin, end, pool, page = (part[order] for part in parts)
    return Regions(address, size, begin, end, pool.astype(np.int32), page)


def _no_segments() -> Segments:
    none, flags = np.empty(0, np.int64), np.empty(0, np.bool_)
    return Segments(none, none, none, none.astype(np.int32), none.astype(np.int32), flags, flags)


def _lifetimes(
    trace: Trace, final: Segments, gain: Action, loss: Action, *, expandable: bool
) -> tuple[I64, I64, I64, I64, I64, I64]:
    """Address, size, begin, end, pool and page of the stretches of one kind."""
    count = len(trace)
    event = np.flatnonzero((trace.action == gain) | (trace.action == loss))
    last = np.flatnonzero(final.expandable == expandable)
    # One entry per event and, at the end of time, one per segment that is still there.
    start = np.concatenate([trace.address[event], final.address[last]])
    size = np.concatenate([trace.size[event], final.total[last]])
    when = np.concatenate([event, np.full(len(last), count)])
    rises = np.concatenate([trace.action[event] == gain, np.ones(len(last), np.bool_)])
    pool = np.concatenate([trace.pool[event], final.pool[last]]).astype(np.int64)
    large = np.concatenate([size[: len(event)] > _PAGE_SMALL, final.large[last]])
    if expandable:
        entry, start, size = _stretches(start, size)
        when, rises, pool, large = when[entry], rises[entry], pool[entry], large[entry]
    order = np.lexsort((when, start))
    start, size, when, rises, pool, large = (c[order] for c in (start, size, when, rises, pool, large))
    same = np.zeros(len(start) + 1, np.bool_)
    np.equal(start[1:], start[:-1], out=same[1:-1]) if len(start) else None

    # A row is born at a rise, or before the trace where the first entry is a fall or the final state.
    first = ~same[:-1]
    ghost = first & (~rises | (when == count))
    born = np.flatnonzero(ghost | (rises & (when < count)))
    begin = np.where(ghost[born], -1, when[born])
    # It ends at its own fall (a ghost known by it) or the next entry's, else it is there at the end.
    own = ghost[born] & ~rises[born]
    following = np.minimum(born + 1, max(len(start) - 1, 0))
    end = np.where(same[1:][born], when[following], count)
    end = np.where(own, when[born], end)
    # Where it is still there at the end, the final segment knows best: old traces name no pools.
    last_entry = np.where(same[1:][born] & (when[following] == count), following, born)
    pool, large = pool[last_entry], large[last_entry]
    page = np.where(large, _PAGE_LARGE, _PAGE_SMALL) if expandable else np.zeros(len(born), np.int64)
    return start[born], size[born], begin, end, pool, page


def _stretches(start: I64, size: I64) -> tuple[NDArray[np.intp], I64, I64]:
    """Cut ranges at every place where any of them begins or ends: (entry, start, size) of the parts."""
    edges = np.unique(np.concatenate([start, start + size]))
    low, high = np.searchsorted(edges, start), np.searchsorted(edges, start + size)
    parts = np.maximum(high - low, 0)
    total = int(parts.sum())
    if total > _STRETCHES_EACH * len(start) + _STRETCHES_FREE:
        return np.arange(len(start)), start, size
    entry = np.repeat(np.arange(len(start)), parts)
    inside = np.arange(total) - np.repeat(np.cumsum(parts) - parts, parts)
    at = low[entry] + inside
    return entry, edges[at], edges[np.minimum(at + 1, max(len(edges) - 1, 0))] - edges[at]


def reserved_splitter(snapshot: Snapshot, timeline: Timeline) -> Callable[[int], dict[str, int]]:
    """A function of an instant that splits reserved − active bytes.

    Its keys: ``cached`` (segments, or whole pages of expandable ones, that hold no block),
    ``inactive_split`` (free parts of segments in use: fragmentation) and ``private_pools`` (free
    memory of CUDA graphs' and engines' pools, which others cannot have). The three add up to
    ``reserved - active`` exactly; all are 0 for a tensor trace.
    """
    regions = timeline.regions

    def split(instant: int) -> dict[str, int]:
        if timeline.reserved is None:
            return {"cached": 0, "inactive_split": 0, "private_pools": 0}
        idle = int(timeline.reserved[instant] - timeline.active[instant])
        private, cached = _idle(timeline, regions, instant)
        # Blocks outside every known segment (foreign allocators) can make the parts exceed the sum.
        private = min(private, max(idle, 0))
        cached = min(cached, max(idle, 0) - private)
        return {"cached": cached, "inactive_split": idle - private - cached, "private_pools": private}

    return split


def _idle(timeline: Timeline, regions: Regions, instant: int) -> tuple[int, int]:
    """Free bytes in private pools and in wholly free segments or pages, at an instant."""
    there = regions.alive_at(instant)
    if not len(there):
        return 0, 0
    address, size = regions.address[there], regions.size[there]
    page, pool = regions.page[there], regions.pool[there]
    # Neighbouring stretches of one expandable segment are one region.
    joined = (page[1:] > 0) & (page[:-1] > 0) & (address[1:] == address[:-1] + size[:-1]) & (pool[1:] == pool[:-1])
    first = np.concatenate([[True], ~joined])
    head = np.flatnonzero(first)
    start, page, pool = address[head], page[head], pool[head]
    total = np.add.reduceat(size, head)

    live = timeline.alive_at(instant)
    live = live[np.argsort(timeline.address[live], kind="stable")]
    at = np.searchsorted(start, timeline.address[live], side="right") - 1
    inside = (at >= 0) & (timeline.address[live] < (start + total)[np.maximum(at, 0)])
    live, at = live[inside], at[inside]
    used = np.bincount(at, timeline.size[live], len(start)).astype(np.int64)

    idle = np.maximum(total - used, 0)
    own = pool != 0
    private = int(idle[own].sum())
    cached = int(idle[~own & (used == 0)].sum())
    partly = ~own & (used > 0) & (page > 0)
    if np.any(partly):
        cached += _free_pages(timeline, live, at, start, total, page, partly)
    return private, cached


def _free_pages(
    timeline: Timeline, live: I64, at: I64, start: I64, total: I64, page: I64, partly: NDArray[np.bool_]
) -> int:
    """Bytes of whole pages between the blocks of expandable regions in use."""
    chosen = partly[at]
    region, rows = at[chosen], live[chosen]
    begin = timeline.address[rows] - start[region]
    end = begin + timeline.size[rows]
    new = np.concatenate([[True], region[1:] != region[:-1]])
    before = np.where(new, 0, np.concatenate([[0], end[:-1]]))  # gaps in front of each block
    pages = np.maximum(begin // page[region] - -(-before // page[region]), 0) * page[region]
    last = np.append(np.flatnonzero(new)[1:] - 1, len(region) - 1)
    tail_of = region[last]
    tail = np.maximum(total[tail_of] // page[tail_of] - -(-end[last] // page[tail_of]), 0) * page[tail_of]
    return int(pages.sum() + tail.sum())
