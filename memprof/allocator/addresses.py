"""Choose the addresses of segments as CUDA's driver does on Linux.

Addresses decide more than names: of free blocks of one size, torch up to 2.11 takes the one with the lower address.
The driver's rule is not documented. This one is read off the segments of snapshots from GPUs, which
``tests/allocator/test_addresses.py`` holds it against:

- Address space comes in ranges of whole 32 MiB, each at the top of the highest gap that has room for it. So the first
  ranges lie one below the other.
- What fits into the free part of a range goes there, into the lowest range that has room, as low as it goes.
- A range without a segment is a gap again.

A process has other mappings in between, which nothing tells of: libraries, the host's memory, CUDA's own. On Windows
and under WSL the driver packs segments without such ranges; that is not modelled.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import NoReturn

from memprof.errors import UsageError

_RANGE = 32 * 2**20
_PAGE = 2 * 2**20
_TOP = 2**52  # far above any card's, for simulations without one

#: Free addresses, lowest first: where each stretch begins and where it ends. No two touch.
_Stretches = list[tuple[int, int]]


class Addresses:
    """Hold which addresses of one device are taken. Sizes are in bytes and count as whole pages of 2 MiB."""

    def __init__(self) -> None:
        self._gaps: _Stretches = [(0, _TOP)]
        self._ranges: dict[int, int] = {}  # where each range begins and ends
        self._order: list[int] = []  # where they begin, lowest first
        self._rooms: dict[int, _Stretches] = {}  # what is free of a range, by its begin
        self._with_room: list[int] = []  # the begins of ranges with a free part, lowest first

    def take(self, size: int) -> int:
        """Take ``size`` bytes and return their address.

        Raises:
            UsageError: more is asked for than the address space has left.
        """
        size = _whole(size, _PAGE)
        for begin in self._with_room:
            rooms = self._rooms[begin]
            for at, (low, high) in enumerate(rooms):
                if high - low >= size:
                    rooms[at : at + 1] = [(low + size, high)] if high - low > size else []
                    if not rooms:
                        self._with_room.remove(begin)
                    return low
        return self._open(size)

    def give_back(self, address: int, size: int) -> None:
        """Give back what :meth:`take` returned for ``size`` bytes."""
        begin = self._order[bisect_right(self._order, address) - 1]
        end, rooms = self._ranges[begin], self._rooms[begin]
        if not rooms:
            insort(self._with_room, begin)
        _add(rooms, address, address + _whole(size, _PAGE))
        if rooms == [(begin, end)]:
            self._with_room.remove(begin)
            self._order.remove(begin)
            del self._ranges[begin], self._rooms[begin]
            _add(self._gaps, begin, end)

    def _open(self, size: int) -> int:
        """Open a range for ``size`` bytes at the top of the highest gap that has room."""
        whole = _whole(size, _RANGE)
        places = (i for i in reversed(range(len(self._gaps))) if self._gaps[i][1] - self._gaps[i][0] >= whole)
        at = next(places, None)
        if at is None:
            refuse(size)
        low, end = self._gaps[at]
        begin = end - whole
        self._gaps[at : at + 1] = [(low, begin)] if begin > low else []
        self._ranges[begin], self._rooms[begin] = end, []
        insort(self._order, begin)
        if size < whole:
            self._rooms[begin].append((begin + size, end))
            insort(self._with_room, begin)
        return begin


def refuse(size: int) -> NoReturn:
    """Say that the address space has not ``size`` bytes, in whole pages, left.

    Raises:
        UsageError: always.
    """
    size = _whole(size, _PAGE)
    raise UsageError(f"{size} contiguous bytes do not fit in the {_TOP // 2**40} TiB of addresses.")


def _whole(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _add(stretches: _Stretches, low: int, high: int) -> None:
    """Add a free stretch, merged with those that it touches."""
    at = bisect_right(stretches, (low, high))
    first = at - 1 if at and stretches[at - 1][1] == low else at
    last = at + 1 if at < len(stretches) and stretches[at][0] == high else at
    merged = [(low, high), *stretches[first:last]]
    stretches[first:last] = [(min(s[0] for s in merged), max(s[1] for s in merged))]
