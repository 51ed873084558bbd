"""Model the CUDA caching allocator: one stream, the default pool, to replay a stream of allocations.

The oracle's own, so that its block sizes do not come from the code they are compared with. Rules as published in
``CUDACachingAllocator.cpp``: 512 B rounding; requests up to 1 MiB from 2 MiB segments, below 10 MiB from 20 MiB
ones, else from segments of a multiple of 2 MiB; best fit by (size, address); a split leaves at least 512 B (small)
or more than 1 MiB (large); neighbours merge. With ``expandable``, one range of addresses per pool, mapped in pages.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

MIB = 2**20
Emit = Callable[[str, int, int], None]


class HeapFull(Exception):
    """The device has no room for a segment."""


@dataclass
class Segment:
    address: int
    total: int
    large: bool
    first: int
    expandable: bool = False


@dataclass
class Block:
    address: int
    size: int
    requested: int
    segment: Segment
    free: bool
    previous: int | None
    next: int | None


class Heap:
    """``malloc`` and ``free``; segment events go to ``emit(action, address, size)``."""

    def __init__(self, emit: Emit, base: int = 0x7F2A00000000, capacity: int = 2**62, expandable: bool = False) -> None:
        self.emit, self.capacity, self.expandable = emit, capacity, expandable
        self.blocks: dict[int, Block] = {}
        self.segments: list[Segment] = []
        self.reserved = 0
        self._cursor = base
        self._free: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
        self._ranges: dict[bool, Segment] = {}

    @staticmethod
    def rounded(size: int) -> int:
        return max(512, -(-size // 512) * 512)

    def malloc(self, requested: int) -> int:
        size = self.rounded(requested)
        large = size > MIB
        pool = self._free[large]
        at = bisect_left(pool, (size, 0))
        block = self.blocks[pool.pop(at)[1]] if at < len(pool) else self._grow(size, large)
        block.free, block.requested = False, requested
        left = block.size - size
        if left > MIB or (left >= 512 and (not large or self.expandable)):
            self._split(block, size)
        return block.address

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, 0, block.segment, True, block.address, block.next)
        if block.next is not None:
            self.blocks[block.next].previous = rest.address
        block.next, block.size = rest.address, size
        self.blocks[rest.address] = rest
        insort(self._free[block.segment.large], (rest.size, rest.address))

    def _grow(self, size: int, large: bool) -> Block:
        if self.expandable:
            return self._map(size, large)
        total = 2 * MIB if not large else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.reserved + total > self.capacity:
            self.empty_cache()
            if self.reserved + total > self.capacity:
                raise HeapFull
        segment = Segment(self._cursor, total, large, self._cursor)
        self._cursor += total + 2 * MIB
        self.reserved += total
        self.segments.append(segment)
        self.emit("segment_alloc", segment.address, total)
        block = self.blocks[segment.address] = Block(segment.address, total, 0, segment, True, None, None)
        return block

    def _map(self, size: int, large: bool) -> Block:
        """Lengthen the pool's one range by whole pages, using the free block at its end."""
        page = 20 * MIB if large else 2 * MIB
        segment = self._ranges.get(large)
        if segment is None:
            segment = self._ranges[large] = Segment(self._cursor, 0, large, self._cursor, True)
            self._cursor += 2**38
            self.segments.append(segment)
        last = max((b for b in self.blocks.values() if b.segment is segment), key=lambda b: b.address, default=None)
        tail = last if last is not None and last.free else None
        more = -(-(size - (tail.size if tail else 0)) // page) * page
        if self.reserved + more > self.capacity:
            raise HeapFull
        start = segment.address + segment.total
        self.emit("segment_map", start, more)
        segment.total += more
        self.reserved += more
        if tail is not None:
            self._free[large].remove((tail.size, tail.address))
            tail.size += more
            return tail
        block = Block(start, more, 0, segment, True, last.address if last else None, None)
        if last is not None:
            last.next = start
        self.blocks[start] = block
        return block

    def free(self, address: int) -> None:
        block = self.blocks[address]
        pool = self._free[block.segment.large]
        block.free, block.requested = True, 0
        for other in (block.next, block.previous):
            neighbour = self.blocks.get(other) if other is not None else None
            if neighbour is None or not neighbour.free:
                continue
            pool.remove((neighbour.size, neighbour.address))
            first, second = (block, neighbour) if neighbour.address > block.address else (neighbour, block)
            first.size += second.size
            first.next = second.next
            if second.next is not None:
                self.blocks[second.next].previous = first.address
            del self.blocks[second.address]
            block = first
        insort(pool, (block.size, block.address))

    def empty_cache(self) -> None:
        """Return whole free segments to the device."""
        for segment in [s for s in self.segments if not s.expandable]:
            block = self.blocks[segment.address]
            if block.free and block.size == segment.total:
                self._free[segment.large].remove((block.size, block.address))
                del self.blocks[segment.address]
                self.segments.remove(segment)
                self.reserved -= segment.total
                self.emit("segment_free", segment.address, segment.total)
