"""Run a recorded program of allocations through the allocator's model under other settings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memprof.allocator.model import Block, CachingAllocator, Pool
from memprof.allocator.settings import AllocatorSettings

I64 = NDArray[np.int64]

FREE, FLUSH, ALLOC = range(3)


@dataclass(frozen=True)
class Program:
    """Hold what a program asked of the allocator: one row per allocation, in any order.

    ``requested`` is in bytes. ``born`` and ``died`` are places in the order of events: ``born`` is -1 for what was
    there before, in the order of ``address``; ``died`` is at least ``end`` for what is there afterwards. ``flushed``
    are the places at which cached memory was given back (``empty_cache``).
    """

    requested: I64
    address: I64
    born: I64
    died: I64
    stream: I64
    pool: I64
    flushed: I64
    end: int


def reserved_within(program: Program, settings: AllocatorSettings, capacity: int | None) -> int:
    """Return the most bytes that the allocator holds of a device of ``capacity`` bytes, while the program runs.

    None: of a device with room for all. Cached segments are given back where they have to be.

    Raises:
        OutOfMemory: the device is full even then.
    """
    allocator = CachingAllocator(settings, capacity)
    acquire, drop = allocator.acquire, allocator.drop
    asked = _asked(program, allocator)
    blocks: list[Block | None] = [None] * len(asked)
    whats, rows = in_order(program)
    for what, row in zip(whats.tolist(), rows.tolist(), strict=True):
        if what == ALLOC:
            blocks[row] = acquire(*asked[row])
        elif what == FREE:
            drop(blocks[row])
        else:
            allocator.empty_cache()
    return allocator.max_reserved


def _asked(program: Program, allocator: CachingAllocator) -> list[tuple[Pool, int, int]]:
    """List of each row what :meth:`CachingAllocator.acquire` takes: the pool, the bytes rounded, the bytes."""
    known: dict[tuple[int, int, int], tuple[Pool, int, int]] = {}
    found = []
    for key in zip(program.requested.tolist(), program.stream.tolist(), program.pool.tolist(), strict=True):
        asked = known.get(key)
        if asked is None:
            size, stream, pool = key
            need = allocator.settings.round_size(size)
            asked = known[key] = (allocator.pool_of(need, stream, pool), need, size)
        found.append(asked)
    return found


def in_order(program: Program) -> tuple[I64, I64]:
    """Return what happens (:data:`FREE`, :data:`FLUSH` or :data:`ALLOC`), and the row it happens to, in order."""
    some = program.requested > 0
    born = np.flatnonzero(some)
    died = np.flatnonzero(some & (program.died < program.end))
    flushed = program.flushed
    when = np.concatenate([program.died[died], flushed, program.born[born]])
    what = np.repeat([FREE, FLUSH, ALLOC], [len(died), len(flushed), len(born)])
    row = np.concatenate([died, np.zeros(len(flushed), np.int64), born])
    address = np.concatenate([np.zeros(len(died) + len(flushed), np.int64), program.address[born]])
    order = np.lexsort((address, what, when))
    return what[order], row[order]
