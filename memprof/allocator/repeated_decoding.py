"""Replay thousands of alike steps through the allocator's model: a decoding loop, whose cache grows by concatenation.

A step takes and drops blocks in the same order as the step before; only sizes grow. Most of its blocks are small, live
shortly and keep their rounded size. A pool of blocks to which the step before did nothing lasting, and of which this
step asks the same, is *parked*: its steps are counted and not run. That changes nothing:

- Pools share no blocks. They meet only where memory is given back because the device is full; a parked pool is brought
  up to that very operation first.
- The allocator decides by sizes and by the state of the pool. Where a step began with the state with which an earlier
  one began, and asks for the same, it ends as that one did.
- Where the small pool has room enough, only what decides where its lasting blocks lie is taken
  (:mod:`memprof.allocator.placement`).
- A small block is as large as asked for (rounded), wherever it lies; so is every block of expandable segments. What a
  parked pool holds at each operation is known without running it. A pool of large blocks, which keep unsplit rests, is
  never parked.

``tests/allocator/test_repeated_decoding.py`` holds it against the same operations one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from memprof.allocator.model import DROP, DROP_OLD, TAKE, Block, CachingAllocator, Pool
from memprof.allocator.placement import Entry, Order, Without

__all__ = ["DROP", "DROP_OLD", "TAKE", "GrowthReplay", "Operation", "Step"]

_PERIODS = 4  # steps after which a pool may be back where it was
_NOTHING = -1


class Operation(NamedTuple):
    """One operation of a step: ``place`` numbers the step's blocks, ``size`` is a place in :attr:`Step.sizes`."""

    kind: int
    place: int
    size: int = _NOTHING


class Step(NamedTuple):
    """One step. Steps that do the same share the same list of ``operations``; ``sizes`` are bytes, more than 0.

    ``streams`` belong to ``sizes``; ``places`` counts the numbers of blocks.
    """

    operations: Sequence[Operation]
    sizes: Sequence[int]
    streams: Sequence[int]
    places: int


class _Parked(NamedTuple):
    since: int
    period: int


class GrowthReplay:
    """Run steps. ``blocks`` are those of the step before the first one, by number; None where one was dropped.

    While the operations stay the same, no size may become smaller.
    """

    def __init__(self, allocator: CachingAllocator, blocks: Sequence[Block | None]) -> None:
        self._allocator = allocator
        # Garbage collection counts how often a pool was searched, so every search must happen.
        self._parks = not allocator.settings.garbage_collection_threshold
        self._blocks = list(blocks)
        self._kept = self._keeps = [place for place, block in enumerate(blocks) if block is not None]
        self._step = self._done = self._before = Step((), (), (), 0)
        self._needs: list[int] = []
        self._homes: list[Pool] = []  # by size
        self._size_of: dict[int, int] = {}
        self._crossed: set[int] = set()  # pools that a size left or joined in the last step
        self._states: dict[int, list[object]] = {}
        self._parked: dict[int, _Parked] = {}
        self._around: list[Entry] | None = None
        self._count = 0
        self._own: list[Block | None] = []
        self._running = False
        self._without: Without | None = None
        self._takes: list[int] = []  # of large blocks in a step, by size

    def run(self, step: Step) -> None:
        """Run one more step.

        Raises:
            OutOfMemory: the device is full.
        """
        changed = self._take_over(step)
        self._own = [None] * step.places
        self._allocator.at, self._running = 0, True
        if (order := self._order_of_deciding(step)) is not None:
            self._run_order(order)
        elif self._parked:
            self._run_around()
        else:
            self._run(0)
        for place in self._keeps:
            if self._own[place] is None:
                self._own[place] = self._blocks[place]
        self._blocks, self._kept, self._running = self._own, self._keeps, False
        self._before, self._done = self._done, step
        self._count += 1
        if order is not None:
            self._states.clear()
        elif self._parks:
            self._look_for_rest(changed)

    @property
    def place(self) -> int:
        """Return the number of the block that is being taken."""
        return self._step.operations[self._allocator.at].place if self._step.operations else 0

    def settle(self) -> list[Block | None]:
        """Bring everything up to the last step; return its blocks by number, None where one was dropped."""
        self._unpark(list(self._parked))
        self._note_requested()
        found: list[Block | None] = [None] * len(self._blocks)
        for place in self._kept:
            found[place] = self._blocks[place]
        return found

    def catch_up(self) -> list[tuple[bool, int, Block]]:
        """Bring parked pools up to the operation that is running: call it before memory is given back.

        Returns all blocks in use: whether of the current step, their number, the block.
        """
        heap, parked, highest = self._allocator, list(self._parked), self._highest()
        heap.allocated -= heap.aside
        heap.active -= heap.aside
        heap.aside, heap.stop = 0, True
        self._unpark(parked)
        done = self._step.operations[: heap.at] if self._running else ()
        for pool in parked:
            self._replay(range(heap.at if self._running else 0), pool, self._own)
        self._restore(highest)
        gone = {(o.kind, o.place) for o in done}
        held = [(False, n, self._blocks[n]) for n in self._kept if (DROP_OLD, n) not in gone]
        if self._running:
            held += [(True, n, b) for n, b in enumerate(self._own) if b is not None and (DROP, n) not in gone]
        return [(own, n, b) for own, n, b in held if b is not None]

    # -- a step ------------------------------------------------------------------------------------------------

    def _take_over(self, step: Step) -> set[int] | None:
        """Make a step the current one; return the pools of which it asks something new, None where all may be."""
        before = self._step
        if before.operations is not step.operations:
            self._unpark(list(self._parked))
            self._note_requested()
            self._step = step
            self._needs = [self._allocator.settings.round_size(size) for size in step.sizes]
            pairs = zip(self._needs, step.streams, strict=True)
            self._homes = [self._allocator.pool_of(need, stream) for need, stream in pairs]
            self._size_of = {o.place: o.size for o in step.operations if o.kind == TAKE}
            dropped = {o.place for o in step.operations if o.kind == DROP}
            self._keeps = [place for place in self._size_of if place not in dropped]
            self._crossed = set()
            self._states.clear()
            self._without = self._leave_out()
            return None
        changed, new = self._crossed, self._new_needs(step, before)
        self._crossed = set()
        for number, need in new:
            home, left = self._allocator.pool_of(need, step.streams[number]), self._homes[number]
            changed |= {id(home), id(left)}
            if home is not left:
                self._crossed |= {id(home), id(left)}
        self._unpark([pool for pool in self._parked if pool in changed])
        self._step = step
        for number, need in new:
            self._needs[number] = need
            self._homes[number] = self._allocator.pool_of(need, step.streams[number])
        if self._without is not None:
            self._without.resized([number for number, _ in new])
        if self._crossed:
            self._around = None
            self._without = self._leave_out()
        return changed

    def _new_needs(self, step: Step, before: Step) -> list[tuple[int, int]]:
        """List the sizes, by number, whose blocks are larger than in the step before, with these blocks' bytes."""
        found = []
        for number, (size, old) in enumerate(zip(step.sizes, before.sizes, strict=True)):
            if size != old and (need := self._allocator.settings.round_size(size)) != self._needs[number]:
                found.append((number, need))
        return found

    def _run(self, first: int) -> None:
        """Run the current step's operations from this one on."""
        heap, operations, sizes = self._allocator, self._step.operations, self._step.sizes
        end, own, old = len(operations), self._own, self._blocks
        while heap.run(operations, first, end, self._homes, self._needs, sizes, own, old):
            first = heap.at + 1

    def _leave_out(self) -> Without | None:
        """Find the allocations of small pools that need not be executed; None where they are few."""
        small = list({id(home): home for home in self._homes if home.small}.values())
        if not self._parks or self._allocator.settings.expandable_segments or not small:
            return None
        self._takes = [0] * len(self._homes)
        for size in self._size_of.values():
            self._takes[size] += not self._homes[size].small
        found = Without(self._step.operations, self._size_of, self._homes.__getitem__, small)
        return found if 2 * found.left_out > len(self._size_of) else None

    def _order_of_deciding(self, step: Step) -> list[Entry] | None:
        """Return what to run of a step where the rest of the small pools' part need not be; None where it must be.

        The first step of its kind is run whole, and so is one in which memory may have to be given back.
        """
        without, heap = self._without, self._allocator
        if without is None or self._parked or self._done.operations is not step.operations:
            return None
        if heap.capacity is not None:
            segment = heap.settings.segment_size
            most = sum(n * segment(need) for n, need in zip(self._takes, self._needs, strict=True) if n)
            if heap.reserved + most > heap.capacity:
                return None
        return without.order(self._needs) if without.has_room(self._needs) else None

    def _is_exact(self, home: Pool) -> bool:
        """Tell whether every block is as large as asked for (rounded), wherever it lies."""
        return home.small or self._allocator.settings.expandable_segments

    def _run_around(self) -> None:
        """Run the current step without the parked pools, and with them once they are needed."""
        if self._around is None:
            self._around = self._order_without_parked()
        at = self._run_order(self._around)
        if at is not None:
            self._run(at)

    def _run_order(self, order: list[Entry]) -> int | None:
        """Run an order without some pools; return the operation to go on from where these were needed."""
        heap, sizes = self._allocator, self._step.sizes
        heap.aside = 0
        if heap.run(order, 0, len(order), self._homes, self._needs, sizes, self._own, self._blocks):
            return heap.at + 1
        heap.aside = 0
        return None

    def _order_without_parked(self) -> list[Entry]:
        """List the operations of the other pools, and between them what the parked ones hold."""
        operations = self._step.operations
        gone = {at for at, operation in enumerate(operations) if id(self._home_of(*operation)) in self._parked}
        return Order(operations, self._size_of, gone).of(self._needs)

    def _home_of(self, kind: int, place: int, size: int) -> Pool:
        if kind == DROP_OLD:
            block = self._blocks[place]
            assert block is not None
            return block.pool
        return self._homes[self._size_of[place]]

    # -- parked pools ------------------------------------------------------------------------------------------

    def _look_for_rest(self, changed: set[int] | None) -> None:
        """Park every pool that a step like this one leaves as it was, or as an earlier step left it."""
        pools = {id(home): home for home in self._homes}
        for pool, home in pools.items():
            if pool in self._parked or not self._is_exact(home):
                continue
            states = self._states.setdefault(pool, [])
            if changed is None or pool in changed:
                states.clear()
            held = tuple((n, b.address) for n in self._kept if (b := self._blocks[n]) is not None and b.pool is home)
            states.append((home.state(), held))
            del states[: -_PERIODS - 1]
            for period in range(1, len(states)):
                if states[-1] == states[-1 - period]:
                    self._parked[pool] = _Parked(self._count, period)
                    self._around = None
                    states.clear()
                    break

    def _unpark(self, pools: list[int]) -> None:
        """Bring parked pools up to the last step that is done."""
        if not pools:
            return
        highest = self._highest()
        for pool in pools:
            since, period = self._parked.pop(pool)
            for _ in range((self._count - since) % period):
                own: list[Block | None] = [None] * len(self._blocks)
                self._replay(range(len(self._step.operations)), pool, own)
                self._blocks = [new or old for new, old in zip(own, self._blocks, strict=True)]
            self._tell_requested(pool)
        self._restore(highest)
        self._around = None

    def _tell_requested(self, pool: int) -> None:
        """Give a pool's blocks the bytes that the last step asked for: they may have grown within their rounding."""
        for place in self._kept:
            block = self._blocks[place]
            if block is not None and id(block.pool) == pool:
                size = self._done.sizes[self._size_of[place]]
                self._allocator.requested += size - block.requested
                block.requested = size

    def _note_requested(self) -> None:
        """Find the most requested bytes of the last step, which no step of the same operations before it exceeds."""
        done, before = self._done, self._before
        if done.operations is not before.operations:
            return  # it was run whole
        steps = [
            (kind, (before if kind == DROP_OLD else done).sizes[self._size_of[n]]) for kind, n, _ in done.operations
        ]
        changes = list(accumulate(size if kind == TAKE else -size for kind, size in steps))
        if changes:
            highest = self._allocator.requested - changes[-1] + max(changes)
            self._allocator.max_requested = max(self._allocator.max_requested, highest)

    def _highest(self) -> tuple[int, int, int]:
        heap = self._allocator
        return heap.max_active, heap.max_allocated, heap.max_requested

    def _restore(self, highest: tuple[int, int, int]) -> None:
        heap = self._allocator
        heap.max_active, heap.max_allocated, heap.max_requested = highest

    def _replay(self, positions: range, pool: int, own: list[Block | None]) -> None:
        """Run those operations that concern one pool; they need no new memory."""
        operations, homes, needs, sizes = self._step.operations, self._homes, self._needs, self._step.sizes
        for at in positions:
            kind, place, size = operations[at]
            if kind == TAKE:
                if id(homes[size]) == pool:
                    own[place] = self._allocator.acquire(homes[size], needs[size], sizes[size])
                continue
            block = own[place] if kind == DROP else self._blocks[place]
            if block is not None and id(block.pool) == pool:
                self._allocator.drop(block)
