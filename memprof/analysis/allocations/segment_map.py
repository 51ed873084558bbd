"""Map the allocator's segments at the moments that matter: blocks by category, and the free memory between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memprof.analysis.breakdown import Breakdown, ReservedSplit
from memprof.snapshot.model import I64, U8, unsigned
from memprof.timeline.segment_layout import SegmentLayout, layout_at
from memprof.vocabulary import History

if TYPE_CHECKING:
    from memprof.analysis.views import Views

# An expandable segment reserves so much more address space than the device has memory.
_ADDRESS_SPACE = 1.125
# The most memory of a device whose size is not known.
_MOST_MEMORY = 1 << 38


@dataclass(frozen=True)
class PrivatePool:
    """Hold a CUDA graph's or an engine's pool: its id, and the bytes of its segments and of what is free in them."""

    identifier: tuple[int, int]
    bytes: int
    free_bytes: int


@dataclass(frozen=True)
class SegmentMap:
    """Hold the segments at one instant. Sizes are in bytes.

    These sums hold, to the byte::

        reserved_bytes - allocated_bytes = idle.total + pending_free_bytes
        reserved_bytes = sum of the segments + not_mapped_bytes

    Attributes:
        moments: what the instant is: ``peak``, ``device-peak``, ``phase:NAME``, ``oom``, ``end`` or ``dump``.
        instant: the number of events before it.
        time_us: when.
        reserved_bytes: reserved memory.
        allocated_bytes: memory that the program uses.
        pending_free_bytes: freed by the program, waiting for a stream; drawn as blocks.
        idle: reserved memory without blocks: whole segments, parts of segments, private pools.
        largest_free_bytes: the largest contiguous free memory in one segment of the default pool.
        unmapped_bytes: address space between mapped stretches of expandable segments.
        not_mapped_bytes: reserved memory whose segment the recording does not show; negative if its segments exceed
            the allocator's figure.
        outside_bytes: blocks that lie outside every known segment.
        not_in_history_bytes: allocated memory at unknown places (see ``Breakdown``).
        pools: the private pools that have segments then.
        layout: the segments, their blocks and the free pieces.
        category: the category's code of each block of the layout.
        block_address: of each block; ``block_size``: its bytes.
    """

    moments: tuple[str, ...]
    instant: int
    time_us: int
    reserved_bytes: int
    allocated_bytes: int
    pending_free_bytes: int
    idle: ReservedSplit
    largest_free_bytes: int
    unmapped_bytes: int
    not_mapped_bytes: int
    outside_bytes: int
    not_in_history_bytes: int
    pools: tuple[PrivatePool, ...]
    layout: SegmentLayout
    category: U8
    block_address: I64
    block_size: I64

    def address_of(self, segment: int) -> int:
        """Return a segment's address as the driver counts it."""
        return unsigned(int(self.layout.address[segment]))


def segment_maps(views: Views) -> tuple[SegmentMap, ...]:
    """Return the maps at the peak, device peak, each phase's highest peak, out of memory and end, in order of time.

    Moments at the same instant are one map. Without segments, as in a CPU recording, there are none.
    """
    if views.timeline.reserved is None or not len(views.timeline.regions):
        return ()
    moments: dict[int, list[str]] = {}
    for name, breakdown in _moments(views):
        moments.setdefault(breakdown.instant, []).append(name)
    return tuple(segment_map(views, at, tuple(moments[at])) for at in sorted(moments))


def _moments(views: Views) -> list[tuple[str, Breakdown]]:
    line = views.timeline
    if line.history is History.NONE:
        return [("dump", views.breakdown(line.n_events))]
    found = [("peak", views.peak)]
    if views.device_peak is not None:
        found.append(("device-peak", views.breakdown(views.device_peak.instant)))
    highest: dict[str, Breakdown] = {}
    for breakdown in views.phases:
        if breakdown.active_bytes > getattr(highest.get(breakdown.phase), "active_bytes", -1):
            highest[breakdown.phase] = breakdown
    found += [(f"phase:{phase}", breakdown) for phase, breakdown in highest.items() if len(highest) > 1]
    if len(line.oom_events):
        found.append(("oom", views.breakdown(int(line.oom_events[-1]) + 1)))
    return [*found, ("end", views.breakdown(line.n_events))]


def segment_map(views: Views, instant: int, moments: tuple[str, ...] = ()) -> SegmentMap:
    """Return the map at any instant of a recording with segments."""
    line = views.timeline
    at = views.peak if instant == views.peak.instant else views.breakdown(instant)
    layout = layout_at(line, instant)
    reserved = at.reserved_bytes or 0
    free = layout.free_size[layout.pool[layout.free_segment] == 0]
    pools = [
        PrivatePool(views.snapshot.pools[pool], int(layout.size[mine].sum()), int(layout.idle[mine].sum()))
        for pool in dict.fromkeys(layout.pool.tolist())
        if pool and len(mine := np.flatnonzero(layout.pool == pool))
    ]
    return SegmentMap(
        moments=moments,
        instant=instant,
        time_us=at.time_us,
        reserved_bytes=reserved,
        allocated_bytes=at.allocated_bytes,
        pending_free_bytes=at.pending_free_bytes,
        idle=at.reserved_split,
        largest_free_bytes=int(free.max(initial=0)),
        unmapped_bytes=_unmapped(layout, views.snapshot.device_facts(line.device).total_bytes),
        not_mapped_bytes=reserved - int(layout.size.sum()),
        outside_bytes=int(line.active[instant]) - int(line.size[layout.rows].sum()),
        not_in_history_bytes=at.not_in_history_bytes,
        pools=tuple(pools),
        layout=layout,
        category=views.attribution.category[layout.rows],
        block_address=line.address[layout.rows],
        block_size=line.size[layout.rows],
    )


def _unmapped(layout: SegmentLayout, device_bytes: int | None) -> int:
    """Return the address space between neighbours of one stream, pool and size class within one expandable segment."""
    mapped = np.flatnonzero(layout.page > 0)
    order = mapped[
        np.lexsort((layout.address[mapped], layout.page[mapped], layout.pool[mapped], layout.stream[mapped]))
    ]
    keys = np.stack([layout.stream[order], layout.pool[order], layout.page[order]])
    alike = np.all(keys[:, 1:] == keys[:, :-1], axis=0)
    gaps = layout.address[order][1:] - (layout.address[order] + layout.size[order])[:-1]
    return int(gaps[alike & (gaps > 0) & (gaps < _ADDRESS_SPACE * (device_bytes or _MOST_MEMORY))].sum())
