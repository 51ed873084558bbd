"""Find which of a step's blocks decide where its lasting blocks lie; the others need not be allocated.

In a pool whose blocks are cut to size and merged whole, what is free follows from what is in use, however that came
about. So a block's place follows from the places of those in use when it is taken, theirs from those in use before, and
nothing else: a temporary that is gone by then has no part in it. A decoding step takes thousands of temporaries in the
small pool and leaves a handful of blocks, which a few dozen others decide.

That holds as long as the pool need not grow: :meth:`Without.has_room` asks for one free block that is large enough for
anything beyond as many as are ever in use at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from memprof.allocator.model import GAP, Pool

#: Kind, number of the block, number of the size, place among the step's operations; of a gap: ``GAP``, highest, last.
Entry = tuple[int, int, int, int]


def deciding_blocks(changes: Iterable[tuple[int, bool]]) -> tuple[set[int], int]:
    """Find the blocks that decide where a step's lasting blocks lie.

    Args:
        changes: what the step takes (True) and gives back (False) of one pool, by number, in order.

    Returns:
        The deciding blocks by number, those that are left included; the most that are in use at once.
    """
    alive: set[int] = set()
    beside: dict[int, frozenset[int]] = {}
    most = 0
    for place, taken in changes:
        if taken:
            beside[place] = frozenset(alive)
            alive.add(place)
            most = max(most, len(alive))
        else:
            alive.discard(place)
    found: set[int] = set()
    waiting = list(alive)
    while waiting:
        place = waiting.pop()
        if place not in found:
            found.add(place)
            waiting += beside[place] - found
    return found, most


class _Room(NamedTuple):
    """Hold a pool some of whose blocks are left out: the most it has in use at once, and the numbers of its sizes."""

    pool: Pool
    most: int
    sizes: list[int]


class Order:
    """List operations without some of them, and what the blocks of these hold in between.

    Args:
        operations: kind (0 takes), number of the block, number of the size.
        size_of: the number of each block's size.
        gone: the places of the operations to leave out.
    """

    def __init__(self, operations: Sequence[tuple[int, int, int]], size_of: dict[int, int], gone: set[int]) -> None:
        self._entries: list[Entry] = []
        self._gaps: list[int] = []  # places in ``_entries``
        self._ends: list[int] = []  # of each gap, in what is left out
        left_out = []
        for at, operation in enumerate(operations):
            if at in gone:
                left_out.append(at)
            else:
                self._close_gap(len(left_out), at)
                self._entries.append((*operation, at))
        self._close_gap(len(left_out), len(operations))
        self._signs = np.array([1 if operations[at][0] == 0 else -1 for at in left_out], dtype=np.int64)
        self._sizes = np.array([size_of[operations[at][1]] for at in left_out], dtype=np.int64)

    def _close_gap(self, seen: int, at: int) -> None:
        if seen > (self._ends[-1] if self._ends else 0):
            self._gaps.append(len(self._entries))
            self._ends.append(seen)
            self._entries.append((GAP, 0, 0, at))

    def of(self, needs: Sequence[int]) -> list[Entry]:
        """Return the operations and gaps; ``needs`` are the bytes (rounded) of each size."""
        found = list(self._entries)
        if self._gaps:
            levels = np.cumsum(self._signs * np.array(needs, dtype=np.int64)[self._sizes])
            begins = np.array([0, *self._ends[:-1]])
            before = np.where(begins > 0, levels[begins - 1], 0)
            highest = np.maximum(np.maximum.reduceat(levels, begins) - before, 0).tolist()
            last = (levels[np.array(self._ends) - 1] - before).tolist()
            for entry, most, left in zip(self._gaps, highest, last, strict=True):
                found[entry] = (GAP, most, left, found[entry][3])
        return found


class Without:
    """List a step's operations without the blocks that decide nothing, and what those hold in between.

    Args:
        operations: kind (0 takes), number of the block, number of the size.
        size_of: the number of each block's size.
        home_of: the pool of a block with this size.
        pools: those to leave blocks out of: cut to size and merged whole.
    """

    def __init__(
        self,
        operations: Sequence[tuple[int, int, int]],
        size_of: dict[int, int],
        home_of: Callable[[int], Pool],
        pools: Iterable[Pool],
    ) -> None:
        left_out: set[int] = set()
        self._rooms: list[_Room] = []
        for pool in pools:
            mine = {place for place, size in size_of.items() if home_of(size) is pool}
            changes = [(place, kind == 0) for kind, place, _ in operations if kind < 2 and place in mine]
            deciding, most = deciding_blocks(changes)
            left_out |= mine - deciding
            self._rooms.append(_Room(pool, most, sorted({size_of[place] for place in mine})))
        self.left_out = len(left_out)
        self._sizes = frozenset(size_of[place] for place in left_out)
        gone = {at for at, (kind, place, _) in enumerate(operations) if kind < 2 and place in left_out}
        self._without = Order(operations, size_of, gone)
        self._order: list[Entry] | None = None

    def resized(self, numbers: Iterable[int]) -> None:
        """Drop the kept order where one of these sizes, by number, is in it."""
        if not self._sizes.isdisjoint(numbers):
            self._order = None

    def order(self, needs: Sequence[int]) -> list[Entry]:
        """Return the operations to run; ``needs`` are the bytes (rounded) of each size."""
        if self._order is None:
            self._order = self._without.of(needs)
        return self._order

    def has_room(self, needs: Sequence[int]) -> bool:
        """Tell whether no pool needs to grow, wherever its blocks lie."""
        for room in self._rooms:
            largest = max((needs[size] for size in room.sizes), default=0)
            if room.pool.room(largest) <= room.most:
                return False
        return True
