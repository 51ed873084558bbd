"""Operations that run together do to the allocator what the same ones do one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from memprof.allocator import native
from memprof.allocator.model import DROP, DROP_OLD, TAKE, AllocatorOutOfMemory, CachingAllocator
from memprof.allocator.settings import MIB, parse_settings

_CHOICES = st.lists(st.tuples(st.sampled_from((TAKE, TAKE, DROP, DROP_OLD)), st.integers(0, 10**6)), max_size=80)
_SIZES = st.lists(st.integers(1, 30 * MIB), min_size=1, max_size=6)
_COLLECTING = "garbage_collection_threshold:0.6,per_process_memory_fraction:0.5"
_CONFS = ["", "expandable_segments:True", "max_split_size_mb:32", _COLLECTING]
_TOTALS = ("reserved", "active", "allocated", "requested", "flushes", "max_reserved", "max_active", "max_requested")


def _operations(choices: list[tuple[int, int]], sizes: int, old: int) -> tuple[list[tuple[int, int, int]], int]:
    """Make operations of random choices: takes, and drops of blocks in use; and count the places."""
    alive: dict[int, list[int]] = {DROP: [], DROP_OLD: list(range(old))}
    found, places = [], 0
    for kind, chance in choices:
        if kind != TAKE and alive[kind]:
            found.append((kind, alive[kind].pop(chance % len(alive[kind])), -1))
        else:
            found.append((TAKE, places, chance % sizes))
            alive[DROP].append(places)
            places += 1
    return found, places


@pytest.mark.parametrize("model", [CachingAllocator, native.allocator])
@pytest.mark.parametrize("conf", _CONFS)
@limits(max_examples=30, deadline=None)
@given(choices=_CHOICES, sizes=_SIZES, old=st.integers(0, 5), capacity=st.sampled_from((None, 200 * MIB)))
def test_run_as_one_by_one(
    model: type[CachingAllocator],
    conf: str,
    choices: list[tuple[int, int]],
    sizes: list[int],
    old: int,
    capacity: int | None,
) -> None:
    operations, places = _operations(choices, len(sizes), old)
    configuration = parse_settings(conf).on_device(300 * MIB)
    whole, heap = CachingAllocator(configuration, capacity), model(configuration, capacity)
    before = [whole.malloc(3 * MIB)[0] for _ in range(old)]
    blocks = [heap.block_at(heap.malloc(3 * MIB)[0]) for _ in range(old)]
    own, at, full = [None] * places, {}, None
    needs = [heap.settings.round_size(size) for size in sizes]
    try:
        for index, (kind, place, size) in enumerate(operations):
            full = index
            if kind == TAKE:
                at[place] = whole.malloc(sizes[size])[0]
            else:
                whole.free(at.pop(place) if kind == DROP else before[place])
        full = None
    except AllocatorOutOfMemory:
        with pytest.raises(AllocatorOutOfMemory):
            heap.run(operations, [heap.pool_of(need) for need in needs], needs, sizes, own, blocks)
        assert heap.at == full
    else:
        heap.run(operations, [heap.pool_of(need) for need in needs], needs, sizes, own, blocks)
    assert {place: block.address for place, block in enumerate(own) if block is not None} == at
    gone = {place for kind, place, _ in operations[:full] if kind == DROP_OLD}
    assert [block is None for block in blocks] == [place in gone for place in range(old)]
    assert [getattr(heap, name) for name in _TOTALS] == [getattr(whole, name) for name in _TOTALS]
    assert heap.segments() == whole.segments()
