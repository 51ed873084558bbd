"""Blocks that decide nothing may be left out: those that last lie where they would, whatever else comes and goes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memprof.allocator.model import GAP, CachingAllocator, Pool
from memprof.allocator.placement import Without
from memprof.allocator.settings import MIB

_KINDS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 10**6)), min_size=1, max_size=120)
_SIZES = st.lists(st.integers(1, MIB), min_size=1, max_size=6)


def _program(choices: list[tuple[int, int]], sizes: int) -> list[tuple[int, int, int]]:
    """Read takes (0) and drops (1) off random choices; two takes for a drop, drops of any block in use."""
    alive: list[int] = []
    found, places = [], 0
    for kind, chance in choices:
        if kind == 1 and alive:
            found.append((1, alive.pop(chance % len(alive)), -1))
        else:
            found.append((0, places, chance % sizes))
            alive.append(places)
            places += 1
    return found


def _heap(free: int) -> CachingAllocator:
    heap = CachingAllocator()
    kept = [heap.malloc(700 * n + 1)[0] for n in range(1, 40)]  # holes between blocks that stay
    for address in [*kept[::2], *[heap.malloc(MIB)[0] for _ in range(2 * free)]]:
        heap.free(address)
    return heap


def _home(heap: CachingAllocator) -> Pool:
    return heap.pool_of(512)


@given(_KINDS, _SIZES, st.integers(0, 60))
def test_what_lasts_lies_where_it_would(choices: list[tuple[int, int]], sizes: list[int], free: int) -> None:
    operations = _program(choices, len(sizes))
    whole, lean = _heap(free), _heap(free)
    size_of = {place: size for kind, place, size in operations if kind == 0}
    without = Without(operations, size_of, lambda size: _home(lean), [_home(lean)])
    needs = [lean.settings.round_size(size) for size in sizes]
    if not without.has_room(needs):
        return
    start = lean.allocated
    at: dict[int, int] = {}
    level = highest = 0
    for kind, place, size in operations:
        if kind == 0:
            at[place], got = whole.malloc(sizes[size])
            level += got
            highest = max(highest, level)
        else:
            level -= needs[size_of[place]]
            whole.free(at.pop(place))
    mine: dict[int, int] = {}
    aside = most = 0
    for kind, place, size, _ in without.order(needs):
        if kind == GAP:
            most = max(most, lean.allocated - start + aside + place)
            aside += size
        elif kind == 0:
            mine[place] = lean.malloc(sizes[size])[0]
            most = max(most, lean.allocated - start + aside)
        else:
            lean.free(mine.pop(place))
    assert mine == at
    assert whole.reserved == lean.reserved
    assert (most, aside) == (highest, 0)
    assert _home(whole).free == _home(lean).free
