"""Derive the sizes of blocks that the final state does not show, from the allocator's rules.

A trace holds the requested bytes, not the block's. In the small pool and in expandable segments, a block is
its request rounded up. In the large pool, a rest of at most 1 MiB is not split off: the block then reaches to
the next block in use, or to the end of its segment, at the instant the block was made. Only that instant
matters, so no event is replayed: all blocks are looked up at once, in lifetimes sorted by address.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memprof.allocator.settings import MIN_BLOCK, SMALL_LIMIT, AllocatorSettings, settings_of
from memprof.snapshot.model import I64, Snapshot, order_of
from memprof.timeline.lifetimes import LifetimeColumns
from memprof.timeline.reserved import Regions
from memprof.vocabulary import Kind

# Real traces have one to five places to look at for each unknown block. A file with far more was made to
# keep its reader busy; its sizes are only rounded.
_PAIRS_EACH, _PAIRS_FREE = 64, 1_000_000
# The number of places in 20 MiB, 512 bytes apart.
_MAX_STEPS = 40_960


def row_sizes(
    rows: LifetimeColumns, kind: Kind, settings: AllocatorSettings, regions: Regions, notes: list[str]
) -> tuple[I64, I64]:
    """Return requested and block bytes of every row.

    The sizes in a trace are requested bytes in some files and block bytes in others. The blocks that
    are still there at the end show which. Blocks freed in the trace get their size from the allocator's rules.
    """
    ended, known = rows.trace_size >= 0, rows.block_size >= 0
    if kind is Kind.TRACE:
        size = np.where(ended, rows.trace_size, rows.block_requested)
        return size, size
    both = ended & known
    as_requested = np.count_nonzero(rows.trace_size[both] == rows.block_requested[both])
    as_block = np.count_nonzero(rows.trace_size[both] == rows.block_size[both])
    requested = np.where(known, rows.block_requested, rows.trace_size)
    if as_block > as_requested:
        notes.append("the trace has block sizes only: the requested bytes of blocks freed in it are unknown")
        return requested, np.where(known, rows.block_size, rows.trace_size)
    if not settings.expandable_segments and np.any(regions.page > 0):
        settings = replace(settings, expandable_segments=True)
    size, derived = block_sizes(rows, requested, regions, settings)
    if derived:
        notes.append(f"the sizes of {derived:,} blocks freed during the recording follow from the allocator's rules")
    return requested, size


def segment_for(snapshot: Snapshot, requested: int) -> int:
    """Return the bytes that the allocator asks of the device to make room for one request."""
    settings = settings_of(snapshot.settings)
    return settings.segment_size(settings.round_size(requested))


def round_sizes(settings: AllocatorSettings, requested: I64) -> I64:
    """Return each request's block bytes before any unsplit rest, as ``AllocatorSettings.round_size`` does."""
    plain = np.maximum(-(-requested // MIN_BLOCK) * MIN_BLOCK, MIN_BLOCK)
    if max(settings.roundup_divisions) <= 1:
        return plain
    values, inverse = np.unique(requested, return_inverse=True)
    rounded = np.array([settings.round_size(int(v)) for v in values], np.int64)
    return rounded[inverse.reshape(-1)]


def block_sizes(
    rows: LifetimeColumns, requested: I64, regions: Regions, settings: AllocatorSettings
) -> tuple[I64, int]:
    """Return the block bytes of every row, and the number of rows that needed the allocator's rules.

    Rows with a final block keep its size. Blocks made before the trace and freed in it are looked up
    at the first event instead of at their birth.
    """
    known = rows.block_size >= 0
    size = np.where(known, rows.block_size, round_sizes(settings, requested))
    large = np.flatnonzero(~known & (size > SMALL_LIMIT))
    if settings.expandable_segments or not len(large):
        return size, len(large)
    reach = np.where(size[large] < settings.max_split_size, SMALL_LIMIT, settings.max_non_split_rounding)
    end = rows.address[large] + size[large]
    when = rows.alloc_event[large]
    limit = np.minimum(
        _next_in_use(end, end + reach, when, rows.address, rows.alloc_event, rows.free_event),
        _next_in_use(end, end + reach, when, regions.address + regions.size, regions.begin_event, regions.end_event),
    )
    found = limit <= end + reach
    size[large[found]] += limit[found] - end[found]
    return size, len(large)


_NOWHERE = np.iinfo(np.int64).max


def _next_in_use(low: I64, high: I64, when: I64, place: I64, begin: I64, end: I64) -> I64:
    """Return for each query the first ``place`` in ``[low, high]`` that is in use at event ``when``.

    Lifetimes at one place do not overlap. The answer is ``_NOWHERE`` where no such place exists.
    """
    order = order_of(begin, place)
    place, begin, end = place[order], begin[order], end[order]
    other = np.diff(place, prepend=_NOWHERE) != 0
    spots, index = place[other], np.cumsum(other) - 1
    span = int(max(begin.max(initial=0), when.max(initial=0))) + 3
    key = index * span + begin + 1

    answer = np.full(len(low), _NOWHERE, np.int64)
    first, last = np.searchsorted(spots, low), np.searchsorted(spots, high, side="right")
    if int((last - first).sum()) > _PAIRS_EACH * len(low) + _PAIRS_FREE:
        return answer
    open_ = np.flatnonzero(first < last)
    at = first[open_].copy()
    for _ in range(_MAX_STEPS):  # each step looks at the next place of every query that has no answer yet
        if not len(open_):
            break
        # Take the last lifetime there that began before the event, or the one there at the start of the trace.
        row = np.searchsorted(key, at * span + np.maximum(when[open_], 0), side="right") - 1
        hit = (row >= 0) & (index[row] == at) & (end[row] > when[open_])
        answer[open_[hit]] = spots[at[hit]]
        at = at + 1
        left = ~hit & (at < last[open_])
        open_, at = open_[left], at[left]
    return answer
