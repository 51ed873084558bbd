"""Model PyTorch's CUDA caching allocator in plain Python.

The model has two uses. It replays a recorded trace, to find the segments the allocator asked the device for
and the size of each block. And it drives a simulation, where it hands out addresses and reports the segments
the device would see.

The rules are those of torch's ``CUDACachingAllocator.cpp``: rounding (:mod:`memprof.allocator.settings`),
small and large pools per stream and private pool, best fit, splitting, merging, garbage collection,
releasing cached blocks before an out-of-memory error, and expandable segments. All sizes are bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import NoReturn

from memprof.allocator.addresses import Addresses
from memprof.allocator.settings import MIN_BLOCK, SMALL_LIMIT, UNLIMITED, AllocatorSettings
from memprof.errors import DoesNotFit, UsageError
from memprof.foreign import RawRecord

_ADDRESS_BITS = 56
#: Kinds of operations of :meth:`CachingAllocator.run`: take a block as number ``place``; drop the own one of that
#: number; drop the old one.
TAKE, DROP, DROP_OLD = range(3)


class AllocatorOutOfMemory(DoesNotFit):
    """Report that the device is full, with the ``requested`` bytes and the device's ``free`` bytes."""

    def __init__(self, requested: int, free: int) -> None:
        super().__init__(f"out of memory: {requested} bytes asked for, {free} bytes free on the device.")
        self.requested = requested
        self.free = free


class Block:
    """Hold a stretch of a segment: in use, free, or (in expandable segments) not mapped to memory."""

    __slots__ = ("address", "born", "free", "mapped", "next", "pool", "prev", "requested", "segment", "size")

    def __init__(self, address: int, size: int, pool: Pool, segment: _Segment) -> None:
        self.address = address
        self.size = size
        self.requested = 0
        self.pool = pool
        self.segment = segment
        self.free = True
        self.mapped = True
        self.born = 0  # the allocator's number of searches when the block became free
        self.prev: Block | None = None
        self.next: Block | None = None


class _Segment:
    """Hold a segment: memory from the device, or the address range of an expandable segment."""

    __slots__ = ("address", "expandable", "first", "page", "shift", "size")

    def __init__(self, address: int, size: int, expandable: bool, page: int, shift: int) -> None:
        self.address = address
        self.shift = shift  # from an address to its place among the addresses of all segments, older ones first
        self.size = size
        self.expandable = expandable
        self.page = page
        self.first: Block | None = None


class Pool:
    """Hold the free blocks of one size class on one stream, smallest first."""

    __slots__ = ("free", "pool", "small", "stream", "unmapped")

    def __init__(self, pool: int, stream: int, small: bool) -> None:
        self.pool = pool
        self.stream = stream
        self.small = small
        # Sorted by size, then place: one number compares faster than a pair.
        self.free: list[int] = []
        self.unmapped: list[int] = []  # addresses


def _key_of(block: Block) -> int:
    return block.size << _ADDRESS_BITS | block.address + block.segment.shift


EventCallback = Callable[[str, int, int, int, int], None]


class CachingAllocator:
    """Model the allocator of one device.

    ``capacity`` is the device's bytes for this process (None: no limit). ``on_event`` is called
    with ``(action, address, bytes, stream, pool)`` for every event that torch's history would hold,
    under torch's action names; the address of an ``oom`` event is the device's free bytes. ``addresses`` chooses where
    segments lie.

    ``reserved``, ``active`` (blocks), ``allocated`` (blocks whose free was not requested) and ``requested``
    are running totals in bytes; each has a highest value ``max_...``. ``flushes`` counts how often all cached memory
    was given back because the device was full (``num_alloc_retries`` of torch's statistics). ``before_release`` is
    called when the device is full, before any cached memory is given back. Without ``tells_blocks``, ``on_event`` hears
    of segments only. ``at`` belongs to :meth:`run`.

    :func:`memprof.allocator.native.allocator` returns the same model in C, where that was built.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        capacity: int | None = None,
        on_event: EventCallback | None = None,
        addresses: Addresses | None = None,
    ) -> None:
        self.settings, self.capacity, self.on_event = settings or AllocatorSettings(), capacity, on_event
        self.addresses = addresses or Addresses()
        self.reserved = self.active = self.allocated = self.requested = 0
        self.max_reserved = self.max_active = self.max_allocated = self.max_requested = 0
        self.flushes = self.at = 0
        self.before_release: Callable[[], None] | None = None
        self.tells_blocks = True
        self._split_limit, self._expands = self.settings.max_split_size, self.settings.expandable_segments
        self._plain = self._split_limit == UNLIMITED and not self._expands
        self._pools: dict[tuple[int, int, bool], Pool] = {}
        self._live: dict[int, Block] = {}
        self._free: dict[int, Block] = {}  # by key
        self._unmapped: dict[int, Block] = {}
        self._segments: dict[int, _Segment] = {}
        self._placed = 0  # bytes of all segments that there ever were
        # Searches of the default large pool, of all streams: torch counts a block's age in these.
        self._searches = 0
        self._allowed = self.settings.allowed_bytes

    # ------------------------------------------------------------------ what a program does

    def malloc(self, size: int, stream: int = 0, pool: int = 0) -> tuple[int, int]:
        """Allocate a block for ``size`` bytes; return its address and its own bytes.

        Zero bytes take no block, as in torch: the result is ``(0, 0)``.

        Raises:
            OutOfMemory: the device is full even after all cached memory was given back.
            UsageError: ``size`` is negative.
        """
        if size < 0:
            self._no_size(size)
        if size == 0:
            return 0, 0
        need = self.settings.round_size(size)
        block = self.acquire(self.pool_of(need, stream, pool), need, size)
        return block.address, block.size

    def free(self, address: int) -> None:
        """Free a block that nothing else uses, at once.

        Raises:
            UsageError: no block in use has this address.
        """
        block = self._live.get(address)
        if block is None:
            self._no_block(address)
        self.drop(block)

    # ------------------------------------------------------------------ the same, for loops over many blocks

    def pool_of(self, need: int, stream: int = 0, pool: int = 0) -> Pool:
        """Return where blocks of ``need`` bytes (rounded) live."""
        key = (pool, stream, need <= SMALL_LIMIT)
        home = self._pools.get(key)
        if home is None:
            home = self._pools[key] = Pool(*key)
        return home

    def block_at(self, address: int) -> Block:
        """Return the block in use at ``address``."""
        return self._live[address]

    def acquire(self, home: Pool, need: int, size: int) -> Block:
        """Allocate a block of ``home`` for ``size`` bytes, ``need`` when rounded, both more than 0.

        Raises:
            OutOfMemory: as :meth:`malloc`.
        """
        if home.pool == 0 and not home.small:
            self._searches += 1
        block = self._best_fit(home, need) or self._grow(home, need, size)
        rest = block.size - need
        if rest and self._splits(home, need, rest):
            self._insert(self._cut(block, block.address + need))
        block.free = False
        block.requested = size
        self._live[block.address] = block
        taken = block.size
        self.active = active = self.active + taken
        if active > self.max_active:
            self.max_active = active
        self.allocated = allocated = self.allocated + taken
        if allocated > self.max_allocated:
            self.max_allocated = allocated
        self.requested = requested = self.requested + size
        if requested > self.max_requested:
            self.max_requested = requested
        if self.on_event is not None and self.tells_blocks:
            self.on_event("alloc", block.address, size, home.stream, home.pool)
        return block

    def drop(self, block: Block) -> None:
        """Free a block in use, at once."""
        address, requested, size = block.address, block.requested, block.size
        told = self.on_event is not None and self.tells_blocks
        self.allocated -= size
        if told:
            self._emit("free_requested", address, requested, block.pool)
        del self._live[address]
        self.active -= size
        self.requested -= requested
        if told:
            self._emit("free_completed", address, requested, block.pool)
        block.requested = 0
        self._release_to_pool(block)

    def run(
        self,
        operations: Sequence[Sequence[int]],
        homes: Sequence[Pool],
        needs: Sequence[int],
        sizes: Sequence[int],
        own: list[Block | None],
        old: list[Block | None],
    ) -> None:
        """Run operations, each a kind (:data:`TAKE`), a place and the number of a size.

        While a block is taken, ``at`` is the operation's index. ``homes``, ``needs`` (rounded bytes) and ``sizes``
        (bytes) are by number of the size; ``own`` and ``old`` are blocks by place: what is taken is put into ``own``,
        what is dropped becomes None.
        """
        for index, (kind, place, size) in enumerate(operations):
            if kind == TAKE:
                self.at = index
                own[place] = self.acquire(homes[size], needs[size], sizes[size])
            else:
                blocks = own if kind == DROP else old
                self.drop(blocks[place])  # type: ignore[arg-type]
                blocks[place] = None

    # ------------------------------------------------------------------ what is refused

    def _no_size(self, size: int) -> NoReturn:
        raise UsageError(f"a block cannot have {size} bytes.")

    def _no_block(self, address: int) -> NoReturn:
        raise UsageError(f"no block in use has the address {address:#x}.")

    def _full(self, requested: int, free: int) -> NoReturn:
        raise AllocatorOutOfMemory(requested, free)

    # ------------------------------------------------------------------ the final state

    def segments(self) -> list[RawRecord]:
        """Return segments and blocks as in torch's snapshot, by address; block frames are empty."""
        out: list[RawRecord] = []
        for expandable, blocks in self.chains():
            run: list[Block] = []
            for block in blocks:
                if block.mapped:
                    run.append(block)
                if run and (not block.mapped or block is blocks[-1]):
                    rows = [(b.address, b.size, b.requested, b.free) for b in run]
                    out.append(segment_record(rows, run[0].pool, expandable))
                    run = []
        return out

    def chains(self) -> list[tuple[bool, list[Block]]]:
        """Return each segment's blocks, both by address, and whether it is expandable."""
        found = []
        for segment in sorted(self._segments.values(), key=lambda s: s.address):
            blocks, block = [], segment.first
            while block is not None:
                blocks.append(block)
                block = block.next
            found.append((segment.expandable, blocks))
        return found

    # ------------------------------------------------------------------ searching

    def _best_fit(self, home: Pool, need: int) -> Block | None:
        """Return the smallest free block that is large enough; None without one, or where split limits forbid it."""
        free = home.free
        index = bisect_left(free, need << _ADDRESS_BITS)
        if index == len(free):
            return None
        if self._plain:
            return self._free.pop(free.pop(index))
        block = self._free[free[index]]
        if block.segment.expandable:
            # Prefer the block with the least room to grow, which leaves the open end of the segment alone.
            while index + 1 < len(free) and (block.prev is not None or block.next is not None):
                other = self._free[free[index + 1]]
                if _room(other) >= _room(block):
                    break
                index, block = index + 1, other
        limit = self._split_limit
        if need < limit <= block.size:
            return None
        if need >= limit and block.size >= need + self.settings.max_non_split_rounding:
            return None
        del self._free[free.pop(index)]
        return block

    def _splits(self, home: Pool, need: int, rest: int) -> bool:
        if home.small or self._expands:
            return rest >= MIN_BLOCK
        return need < self._split_limit and rest > SMALL_LIMIT

    def _insert(self, block: Block) -> None:
        block.free = True
        block.born = self._searches
        key = _key_of(block)
        insort(block.pool.free, key)
        self._free[key] = block

    def _remove(self, block: Block) -> None:
        free, key = block.pool.free, _key_of(block)
        del free[bisect_left(free, key)]
        del self._free[key]

    def _release_to_pool(self, block: Block) -> None:
        """Merge a block with its free neighbours and put it back into its pool."""
        before, after = block.prev, block.next
        if before is not None and before.free and before.mapped:
            self._remove(before)
            self._absorb(block, before)
        if after is not None and after.free and after.mapped:
            self._remove(after)
            self._absorb(block, after)
        self._insert(block)

    def _absorb(self, block: Block, neighbour: Block) -> None:
        """Make ``neighbour``, which is in no pool, a part of ``block``."""
        if block.prev is neighbour:
            block.address = neighbour.address
            block.prev = neighbour.prev
            if block.prev is not None:
                block.prev.next = block
        else:
            block.next = neighbour.next
            if block.next is not None:
                block.next.prev = block
        block.size += neighbour.size
        if block.segment.first is neighbour:
            block.segment.first = block

    # ------------------------------------------------------------------ memory from the device

    def _grow(self, home: Pool, need: int, size: int) -> Block:
        """Return a free block of new memory; where the device is full, give cached memory back first."""
        if self._allowed is not None and self.settings.garbage_collection_threshold > 0:
            self._collect_garbage(self._allowed)
        block = self._device_alloc(home, need)
        if block is None and self.before_release is not None:
            self.before_release()
        if block is None and self._release_available(home, need):
            block = self._device_alloc(home, need)
        if block is None:
            self.flushes += 1
            self.empty_cache()
            block = self._device_alloc(home, need)
        if block is None:
            free = self._device_free()
            if self.on_event is not None:
                self.on_event("oom", free, size, home.stream, home.pool)
            self._full(size, free)
        return block

    def _device_free(self) -> int:
        return UNLIMITED if self.capacity is None else max(self.capacity - self.reserved, 0)

    def _device_alloc(self, home: Pool, need: int) -> Block | None:
        size = self.settings.segment_size(need)
        # torch compares the fraction with a whole segment's bytes, also where only pages are mapped.
        if self._allowed is not None and self.reserved + size > self._allowed:
            return None
        if self.settings.expandable_segments:
            return self._expand(home, need)
        if size > self._device_free():
            return None
        segment = self._segment(size, False, size)
        block = segment.first = Block(segment.address, size, home, segment)
        self._segments[segment.address] = segment
        self._reserve(size)
        self._emit("segment_alloc", segment.address, size, home)
        return block

    def _segment(self, size: int, expandable: bool, page: int) -> _Segment:
        address = self.addresses.take(size)
        shift = self._placed - address if self.settings.oldest_first else 0
        self._placed += size
        return _Segment(address, size, expandable, page, shift)

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.max_reserved = max(self.max_reserved, self.reserved)

    def _release_segment(self, block: Block) -> None:
        self._remove(block)
        del self._segments[block.segment.address]
        self.addresses.give_back(block.address, block.size)
        self.reserved -= block.size
        self._emit("segment_free", block.address, block.size, block.pool)

    def _release_available(self, home: Pool, need: int) -> bool:
        """With a split limit, give back one oversize block that is large enough, else the largest that sum to it."""
        limit = self.settings.max_split_size
        if limit == UNLIMITED:
            return False
        wanted = max(need, limit)
        index = bisect_left(home.free, wanted << _ADDRESS_BITS)
        if index < len(home.free):
            block = self._free[home.free[index]]
            if not block.segment.expandable:
                self._release_segment(block)
                return True
        released = 0
        for key in reversed(home.free[:index]):
            block = self._free[key]
            if released >= wanted or block.size < limit:
                break
            if not block.segment.expandable:
                released += block.size
                self._release_segment(block)
        return released >= wanted

    def empty_cache(self) -> None:
        """Give unused segments and pages of expandable ones back to the device, large pools first, as torch does."""
        default = [p for p in self._pools.values() if p.pool == 0]  # a private pool keeps its memory while it lives
        for home in sorted(default, key=lambda p: (p.small, p.stream)):
            expandable: list[Block] = []
            for key in list(home.free):
                block = self._free[key]
                if block.segment.expandable:
                    expandable.append(block)
                elif block.prev is None and block.next is None:
                    self._release_segment(block)
            for block in expandable:
                self._unmap(block)

    def _collect_garbage(self, allowed: int) -> None:
        """Above the threshold, give back the unsplit large blocks that have been free the longest."""
        limit = int(self.settings.garbage_collection_threshold * allowed)
        target = self.reserved - limit
        if target <= 0:
            return
        pools = [p for p in self._pools.values() if p.pool == 0 and not p.small]
        cached = [self._free[key] for p in pools for key in p.free]
        candidates = [b for b in cached if b.prev is None and b.next is None and not b.segment.expandable]
        age = {b.address: self._searches - b.born for b in candidates}
        total, reclaimed, freed = sum(age.values()), 0, True
        while reclaimed < target and freed and candidates:
            threshold, freed = total / len(candidates), False
            for block in list(candidates):
                if age[block.address] >= threshold:
                    freed = True
                    reclaimed += block.size
                    total -= age[block.address]
                    candidates.remove(block)
                    self._release_segment(block)

    # ------------------------------------------------------------------ expandable segments

    def _expand(self, home: Pool, need: int) -> Block | None:
        """Map pages until a free block of ``need`` bytes exists; take it out of its pool and return it."""
        block = self._expandable_candidate(home, need)
        mapped = block if block.mapped else self._map(block, need)
        while mapped is not None and mapped.size < need:
            tail = mapped.next
            assert tail is not None
            mapped = self._map(tail, need - mapped.size)
        if mapped is not None:
            self._remove(mapped)
        return mapped

    def _expandable_candidate(self, home: Pool, need: int) -> Block:
        """Return the lowest unmapped block that has room, with the free one before it; else a new range."""
        for address in home.unmapped:
            block = self._unmapped[address]
            if block.prev is not None and block.prev.free:
                block = block.prev
            if _free_run(block, need):
                return block
        device = self.capacity if self.capacity is not None else 80 * 2**30
        page = self.settings.page_size(small=home.small)
        size = -(-max(device * 9 // 8, need) // page) * page
        segment = self._segment(size, True, page)
        block = segment.first = Block(segment.address, size, home, segment)
        self._segments[segment.address] = segment
        self._add_unmapped(block)
        return block

    def _add_unmapped(self, block: Block) -> None:
        block.mapped = False
        block.free = True
        insort(block.pool.unmapped, block.address)
        self._unmapped[block.address] = block

    def _drop_unmapped(self, block: Block) -> None:
        block.pool.unmapped.remove(block.address)
        del self._unmapped[block.address]

    def _map(self, block: Block, size: int) -> Block | None:
        """Map whole pages at the start of an unmapped block; return the free block they become part of."""
        page = block.segment.page
        mapped = min(-(-size // page) * page, block.size)
        if mapped > self._device_free():
            return None
        self._drop_unmapped(block)
        if mapped < block.size:
            self._add_unmapped(self._cut(block, block.address + mapped))
        block.mapped = True
        self._reserve(mapped)
        self._emit("segment_map", block.address, mapped, block.pool)
        self._release_to_pool(block)
        return block

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages inside a free block."""
        segment, page = block.segment, block.segment.page
        begin = segment.address + -(-(block.address - segment.address) // page) * page
        end = segment.address + (block.address + block.size - segment.address) // page * page
        if begin >= end:
            return
        self._remove(block)
        if block.address < begin:  # the part before the pages keeps its memory
            block, head = self._cut(block, begin), block
            self._insert(head)
        if end < block.address + block.size:
            self._insert(self._cut(block, end))
        self.reserved -= end - begin
        self._emit("segment_unmap", begin, end - begin, block.pool)
        for neighbour in (block.prev, block.next):
            if neighbour is not None and not neighbour.mapped:
                self._drop_unmapped(neighbour)
                self._absorb(block, neighbour)
        if block.prev is None and block.next is None:
            del self._segments[segment.address]
            self.addresses.give_back(segment.address, segment.size)
        else:
            self._add_unmapped(block)

    def _cut(self, block: Block, at: int) -> Block:
        """Divide a block that is in no pool and return its second part, which is in no pool either."""
        tail = Block(at, block.address + block.size - at, block.pool, block.segment)
        tail.prev, tail.next = block, block.next
        if block.next is not None:
            block.next.prev = tail
        block.next, block.size = tail, at - block.address
        return tail

    def _emit(self, action: str, address: int, size: int, home: Pool) -> None:
        if self.on_event is not None:
            self.on_event(action, address, size, home.stream, home.pool)


def segment_record(blocks: Sequence[tuple[int, int, int, bool]], pool: Pool, expandable: bool) -> RawRecord:
    """Return a segment as in torch's snapshot; of each block: address, bytes, requested bytes, whether it is free."""
    used = [(size, requested) for _, size, requested, free in blocks if not free]
    allocated = sum(size for size, _ in used)
    return {
        "device": 0,
        "address": blocks[0][0],
        "total_size": sum(size for _, size, _, _ in blocks),
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(requested for _, requested in used),
        "stream": pool.stream,
        "segment_type": "small" if pool.small else "large",
        "segment_pool_id": (0, pool.pool),
        "is_expandable": expandable,
        "frames": [],
        "blocks": [
            {
                "address": address,
                "size": size,
                "requested_size": requested,
                "state": "inactive" if free else "active_allocated",
                "frames": [],
            }
            for address, size, requested, free in blocks
        ],
    }


def _room(block: Block) -> int:
    """Return the bytes a block of an expandable segment can grow to: its own and the unmapped block after it."""
    rest = block.next
    return block.size + (rest.size if rest is not None and not rest.mapped else 0)


def _free_run(block: Block, need: int) -> bool:
    """Tell whether a block and the free or unmapped blocks after it hold ``need`` bytes."""
    total, at = 0, block
    while total < need:
        total += at.size
        if at.next is None or not at.next.free:
            break
        at = at.next
    return total >= need
