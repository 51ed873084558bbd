"""Split the reserved memory that holds no block into cached, inactive and private-pool bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from memprof.snapshot.model import I64, distinct
from memprof.timeline.reserved import Regions
from memprof.timeline.timeline import Timeline


def idle_memory(timeline: Timeline) -> Callable[[int], dict[str, int]]:
    """Return a function of an instant that splits reserved − active bytes.

    Its keys are ``cached`` (segments, or whole pages of expandable ones, that hold no block),
    ``inactive_split`` (free parts of segments in use: fragmentation) and ``private_pools`` (free
    memory of CUDA graphs' and engines' pools, which nothing else can use). The three add up to
    ``reserved - active`` bytes exactly; all are 0 for a tensor trace.
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


def idle_pools(timeline: Timeline, instant: int) -> dict[int, tuple[int, int]]:
    """Return for each private pool its bytes and how many of them no block uses, at an instant.

    Keys index ``snapshot.pools``. Only the CUDA graphs or the engine that the pool belongs to can use what is free.
    """
    regions = timeline.regions
    there = regions.alive_at(instant)
    rows = timeline.alive_at(instant)
    found = {}
    for pool in distinct(regions.pool[there][regions.pool[there] != 0].astype(np.int64)).tolist():
        mine = there[regions.pool[there] == pool]
        order = np.argsort(regions.address[mine], kind="stable")
        start, end = regions.address[mine][order], (regions.address[mine] + regions.size[mine])[order]
        at = np.searchsorted(start, timeline.address[rows], side="right") - 1
        inside = (at >= 0) & (timeline.address[rows] < end[np.maximum(at, 0)])
        total = int(regions.size[mine].sum())
        found[int(pool)] = (total, max(0, total - int(timeline.size[rows[inside]].sum())))
    return found


def _idle(timeline: Timeline, regions: Regions, instant: int) -> tuple[int, int]:
    """Return the free bytes in private pools and in wholly free segments or pages, at an instant."""
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
    """Return the bytes of whole pages between the blocks of expandable regions in use."""
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
