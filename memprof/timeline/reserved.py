"""Find which address ranges of the device the allocator held, and when.

A region is a segment, or a stretch of an expandable segment between two places where pages were ever
mapped or unmapped. Each region has one row per lifetime, by the timeline's convention for instants.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memprof.allocator.settings import SMALL_SEGMENT, AllocatorSettings
from memprof.snapshot.model import I32, I64, Action, Segments, Trace, distinct
from memprof.timeline.lifetimes import LifetimeColumns

# In a hostile file every unmap can span every map; real files stay near one stretch per event.
_STRETCHES_EACH, _STRETCHES_FREE = 8, 1_000_000


@dataclass(frozen=True)
class Regions:
    """Hold regions by address, then time. ``size`` and ``page`` are in bytes; ``stream`` is the one of its blocks.

    ``page`` is 0 for ordinary segments, which are allocated and freed as a whole.
    """

    address: I64
    size: I64
    begin_event: I64
    end_event: I64
    pool: I32
    page: I64
    stream: I64

    def __len__(self) -> int:
        return len(self.address)

    def alive_at(self, instant: int) -> I64:
        """Return the rows alive at ``instant``, by address."""
        return np.flatnonzero((self.begin_event < instant) & (instant <= self.end_event))


def regions_of(trace: Trace, segments: Segments | None, settings: AllocatorSettings) -> Regions:
    """Return every region that existed between the first event and the last."""
    final = segments if segments is not None else _no_segments()
    whole = _lifetimes(trace, final, Action.SEGMENT_ALLOC, Action.SEGMENT_FREE, None)
    paged = _lifetimes(trace, final, Action.SEGMENT_MAP, Action.SEGMENT_UNMAP, settings)
    parts = [np.concatenate([a, b]) for a, b in zip(whole, paged, strict=True)]
    order = np.lexsort((parts[2], parts[0]))
    address, size, begin, end, pool, page, stream = (part[order] for part in parts)
    return Regions(address, size, begin, end, pool.astype(np.int32), page, stream)


def _no_segments() -> Segments:
    none, flags = np.empty(0, np.int64), np.empty(0, np.bool_)
    return Segments(none, none, none, none.astype(np.int32), none.astype(np.int32), flags, flags)


def _lifetimes(
    trace: Trace, final: Segments, gain: Action, loss: Action, paged: AllocatorSettings | None
) -> tuple[I64, I64, I64, I64, I64, I64, I64]:
    """Return the address, size, begin, end, pool, page and stream of all regions of one kind.

    ``paged``: the settings by which expandable segments grow; None for ordinary segments.
    """
    count, expandable = len(trace), paged is not None
    event = np.flatnonzero((trace.action == gain) | (trace.action == loss))
    last = np.flatnonzero(final.expandable == expandable)
    # One entry per event, and one at the end of the trace per segment that is still there.
    start = np.concatenate([trace.address[event], final.address[last]])
    size = np.concatenate([trace.size[event], final.total[last]])
    when = np.concatenate([event, np.full(len(last), count)])
    rises = np.concatenate([trace.action[event] == gain, np.ones(len(last), np.bool_)])
    pool = np.concatenate([trace.pool[event], final.pool[last]]).astype(np.int64)
    stream = np.concatenate([trace.stream[event], final.stream[last]])
    large = np.concatenate([size[: len(event)] > SMALL_SEGMENT, final.large[last]])
    if expandable:
        entry, start, size = _stretches(start, size)
        when, rises, pool, large, stream = (c[entry] for c in (when, rises, pool, large, stream))
    order = np.lexsort((when, start))
    start, size, when, rises, pool, large, stream = (c[order] for c in (start, size, when, rises, pool, large, stream))
    same = np.zeros(len(start) + 1, np.bool_)
    np.equal(start[1:], start[:-1], out=same[1:-1]) if len(start) else None

    # A row begins at a rise. It begins before the trace (a ghost) where its first entry is a fall or the final state.
    first = ~same[:-1]
    ghost = first & (~rises | (when == count))
    born = np.flatnonzero(ghost | (rises & (when < count)))
    begin = np.where(ghost[born], -1, when[born])
    # A ghost known by its fall ends there. Any other row ends at the next entry, or is there at the end.
    own = ghost[born] & ~rises[born]
    following = np.minimum(born + 1, max(len(start) - 1, 0))
    end = np.where(same[1:][born], when[following], count)
    end = np.where(own, when[born], end)
    # A row that is there at the end takes the final segment's pool, because old traces name no pools.
    last_entry = np.where(same[1:][born] & (when[following] == count), following, born)
    pool, large = pool[last_entry], large[last_entry]
    page = np.zeros(len(born), np.int64)
    if paged is not None:
        page = np.where(large, paged.page_size(small=False), paged.page_size(small=True))
    return start[born], size[born], begin, end, pool, page, stream[born]


def _stretches(start: I64, size: I64) -> tuple[NDArray[np.intp], I64, I64]:
    """Cut ranges at every place where one begins or ends; return the parts as (entry, start, size)."""
    edges = distinct(np.concatenate([start, start + size]))
    low, high = np.searchsorted(edges, start), np.searchsorted(edges, start + size)
    parts = np.maximum(high - low, 0)
    total = int(parts.sum())
    if total > _STRETCHES_EACH * len(start) + _STRETCHES_FREE:
        return np.arange(len(start)), start, size
    entry = np.repeat(np.arange(len(start)), parts)
    inside = np.arange(total) - np.repeat(np.cumsum(parts) - parts, parts)
    at = low[entry] + inside
    return entry, edges[at], edges[np.minimum(at + 1, max(len(edges) - 1, 0))] - edges[at]


def add_pools(rows: LifetimeColumns, trace: Trace, regions: Regions) -> None:
    """Give rows the private pool of the segment around them, because events before torch 2.10 name no pool."""
    private = np.flatnonzero((regions.pool != 0) & (regions.end_event == len(trace)))
    if not len(private) or np.any(trace.pool):
        return
    at = np.searchsorted(regions.address[private], rows.address, side="right") - 1
    region = private[np.maximum(at, 0)]
    inside = (at >= 0) & (rows.address < regions.address[region] + regions.size[region])
    inside &= regions.begin_event[region] <= rows.alloc_event
    rows.pool[inside] = regions.pool[region[inside]]
