"""Split the reserved memory that holds no block into cached, inactive and private-pool bytes."""

from __future__ import annotations

from collections.abc import Callable

from memprof.snapshot.model import distinct
from memprof.timeline.segment_layout import SegmentLayout, layout_at
from memprof.timeline.timeline import Timeline


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
