"""Where segments lie: no two overlap, what is given back is used again, and GPUs order them as the rule does."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.allocator.addresses import Addresses
from memprof.errors import UsageError
from memprof.snapshot import load_snapshot
from memprof.snapshot.model import Action

MIB = 2**20


def test_ranges_go_down_and_ends_are_filled() -> None:
    """The first segments of a recording from a GPU (cs336-2.7b-fullstep-ctx128, from its third on), in MiB."""
    addresses = Addresses()
    begin = addresses.take(128 * MIB)
    seen = [(addresses.take(size * MIB) - begin) // MIB for size in (100, 100, 26, 26, 26, 26, 100)]
    assert seen == [-128, -256, -156, -28, -288, -320, -448]


def test_a_freed_part_is_room_and_a_freed_range_is_a_gap() -> None:
    addresses = Addresses()
    high, low = addresses.take(100 * MIB), addresses.take(100 * MIB)
    end = addresses.take(20 * MIB)
    assert end == low + 100 * MIB
    addresses.give_back(low, 100 * MIB)
    assert addresses.take(80 * MIB) == low  # what is left of a range comes first
    addresses.give_back(high, 100 * MIB)
    assert addresses.take(64 * MIB) == high + 64 * MIB  # then the highest gap, at its top


def test_what_no_address_space_holds_is_said() -> None:
    with pytest.raises(UsageError, match="4096 TiB"):
        Addresses().take(2**53)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 9), st.booleans()), max_size=120))
def test_no_two_overlap_and_all_can_be_given_back(steps: list[tuple[int, int, bool]]) -> None:
    addresses = Addresses()
    first = addresses.take(300 * MIB)
    addresses.give_back(first, 300 * MIB)
    live: dict[int, int] = {}
    for size, which, gives in steps:
        if gives and live:
            address = sorted(live)[which % len(live)]
            addresses.give_back(address, live.pop(address))
        else:
            begin = addresses.take(size * MIB - 5)
            assert begin % (2 * MIB) == 0
            assert all(begin + size * MIB <= a or a + n <= begin for a, n in live.items())
            live[begin] = size * MIB - 5
    for address, size in live.items():
        addresses.give_back(address, size)
    assert addresses.take(300 * MIB) == first  # nothing is lost


def agreement(path: Path) -> tuple[int, int]:
    """Count pairs of segments of one size that a recording saw being made and that lived together: those that the rule
    puts in the order in which the GPU's driver put them, and all. What was there before is taken highest first."""
    snapshot = load_snapshot(path)
    device = snapshot.devices[0]
    trace = snapshot.traces.get(device)
    if trace is None:
        return 0, 0
    events = [
        (action == Action.SEGMENT_ALLOC, address, size)
        for action, address, size in zip(
            trace.action.tolist(), trace.address.tolist(), trace.size.tolist(), strict=True
        )
        if action in (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE)
    ]
    now = snapshot.segments[device]
    before = dict(zip(now.address.tolist(), now.total.tolist(), strict=True))
    for made, address, size in reversed(events):
        if made:
            before.pop(address, None)
        else:
            before[address] = size
    addresses = Addresses()
    ours = {address: addresses.take(before[address]) for address in sorted(before, reverse=True)}
    young: defaultdict[int, set[int]] = defaultdict(set)
    right = pairs = 0
    for made, address, size in events:
        if made:
            ours[address] = addresses.take(size)
            right += sum((other < address) == (ours[other] < ours[address]) for other in young[size])
            pairs += len(young[size])
            young[size].add(address)
        else:
            addresses.give_back(ours.pop(address), size)
            young[size].discard(address)
    return right, pairs


def test_measured_segments_are_ordered_so(shared: Path) -> None:
    """All snapshots from GPUs that show segments being made. Addresses that only rise order 33,018 of 213,507 pairs so.

    ``torch.compile`` loads its kernels in between, and CUDA's own mappings take the gaps; it is held only to the half.
    """
    lowest = {"cs336-compile-fwd-ctx256-t26": 0.5, "select_n-llama-infer-offload-t21": 0.88}
    right = pairs = 0
    for path in sorted((shared / "snapshots").glob("*.pickle")):
        good, all_ = agreement(path)
        if all_:
            assert good >= lowest.get(path.stem, 0.98) * all_, (path.stem, good, all_)
        right, pairs = right + good, pairs + all_
    assert pairs > 200_000
    assert right > 0.9 * pairs
