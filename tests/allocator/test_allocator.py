"""The allocator's model: its rules one by one, its invariants, and recorded traces replayed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from memprof.allocator.addresses import Addresses
from memprof.allocator.model import AllocatorOutOfMemory, CachingAllocator
from memprof.allocator.settings import AllocatorSettings, parse_settings, settings_of
from memprof.errors import UsageError
from memprof.snapshot import Action, load_snapshot
from memprof.timeline.timeline import build_timeline
from memprof.vocabulary import History
from tests.snapshot.programs import MIB, Program, programs


def recorded(
    text: str = "", capacity: int | None = None, total: int | None = None
) -> tuple[CachingAllocator, list[tuple[str, int]]]:
    """An allocator, and its events; ``total`` is what a memory fraction is a share of."""
    events: list[tuple[str, int]] = []
    settings = parse_settings(text).on_device(total)
    allocator = CachingAllocator(settings, capacity, lambda action, *event: events.append((action, event[1])))
    return allocator, events


@pytest.mark.parametrize(
    ("request_", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB, 12 * MIB),  # a rest of at most 1 MiB would be kept; here 2 MiB rounding leaves more
        (11 * MIB + 1, 12 * MIB, 12 * MIB),  # ... and here less: the block gets the whole segment
    ],
)
def test_rounding_and_segments(request_: int, block: int, segment: int) -> None:
    allocator, events = recorded()
    _, size = allocator.malloc(request_)
    if request_ == 10 * MIB + 1:
        block = 10 * MIB + 512
    assert size == block
    assert events == [("segment_alloc", segment), ("alloc", request_)]


def test_best_fit_and_merging() -> None:
    allocator, _ = recorded()
    blocks = [allocator.malloc(4 * MIB)[0] for _ in range(5)]  # one 20 MiB segment, full
    assert allocator.reserved == 20 * MIB
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    allocator.free(blocks[3])
    assert allocator.malloc(4 * MIB)[0] == blocks[0], "the smallest that fits, not the first or the largest"
    assert allocator.malloc(8 * MIB)[0] == blocks[2], "neighbours merge"
    assert allocator.reserved == 20 * MIB


def test_an_unsplit_rest_stays_with_its_block() -> None:
    allocator, _ = recorded()
    address, _ = allocator.malloc(20 * MIB)
    allocator.free(address)
    assert allocator.malloc(19 * MIB)[1] == 20 * MIB
    allocator.free(address)
    assert allocator.malloc(19 * MIB - 512)[1] == 19 * MIB - 512


def test_streams_and_pools_do_not_share() -> None:
    allocator, events = recorded()
    address, _ = allocator.malloc(512)
    allocator.free(address)
    allocator.malloc(512, stream=3)
    allocator.malloc(512, pool=1)
    assert [e for e, _ in events].count("segment_alloc") == 3
    assert [(s["stream"], s["segment_pool_id"]) for s in allocator.segments()] == [
        (0, (0, 0)),
        (3, (0, 0)),
        (0, (0, 1)),
    ]


def test_a_freed_block_is_used_again_and_not_freed_twice() -> None:
    allocator, _ = recorded()
    address, size = allocator.malloc(1000)
    assert (allocator.active, allocator.allocated, allocator.requested) == (size, size, 1000)
    allocator.free(address)
    assert (allocator.active, allocator.allocated, allocator.requested) == (0, 0, 0)
    for unused in (address, 12345):
        with pytest.raises(UsageError):
            allocator.free(unused)
    assert allocator.malloc(1000)[0] == address


def test_cached_segments_go_back_before_the_device_runs_out() -> None:
    allocator, events = recorded(capacity=50 * MIB)
    address, _ = allocator.malloc(30 * MIB)
    allocator.free(address)
    allocator.malloc(40 * MIB)
    assert [e for e, _ in events][-3:] == ["segment_free", "segment_alloc", "alloc"]
    with pytest.raises(AllocatorOutOfMemory) as caught:
        allocator.malloc(20 * MIB)
    assert (caught.value.requested, caught.value.free, caught.value.exit_code) == (20 * MIB, 10 * MIB, 4)
    assert events[-1] == ("oom", 20 * MIB)


def test_split_limit() -> None:
    allocator, _ = recorded("max_split_size_mb:100")
    big, _ = allocator.malloc(200 * MIB)
    allocator.free(big)
    allocator.malloc(50 * MIB)
    assert allocator.reserved == 250 * MIB, "a small request does not split a block above the limit"
    assert allocator.malloc(190 * MIB) == (big, 200 * MIB), "a large one takes it whole, within 20 MiB"
    allocator.free(big)
    allocator.malloc(150 * MIB)
    assert allocator.reserved == 400 * MIB


def test_limits_are_met_exactly() -> None:
    small, _ = recorded()
    small.malloc(MIB)
    assert small.malloc(MIB - 512)[1] == MIB - 512, "a rest of one smallest block is split off"
    full, _ = recorded(capacity=2 * MIB)
    full.malloc(512)
    assert full.reserved == 2 * MIB, "the last byte of a device can be had"
    limited, _ = recorded("max_split_size_mb:100")
    big, _ = limited.malloc(100 * MIB)
    limited.free(big)
    limited.malloc(50 * MIB)
    assert limited.reserved == 150 * MIB, "a block as large as the limit is above it"


def test_a_segment_with_a_block_in_use_stays() -> None:
    allocator, _ = recorded()
    first, _ = allocator.malloc(4 * MIB)
    allocator.malloc(4 * MIB)
    allocator.free(first)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB


def test_garbage_collection_takes_the_oldest() -> None:
    allocator, events = recorded("garbage_collection_threshold:0.5,per_process_memory_fraction:0.5", total=400 * MIB)
    often, _ = allocator.malloc(12 * MIB)
    old, _ = allocator.malloc(60 * MIB)
    new, _ = allocator.malloc(40 * MIB)
    allocator.free(often)
    allocator.free(old)
    for _ in range(5):
        allocator.free(allocator.malloc(12 * MIB)[0])
    allocator.free(new)
    allocator.malloc(90 * MIB)
    freed = [size for action, size in events if action == "segment_free"]
    assert freed == [60 * MIB]


def test_without_a_memory_fraction_no_garbage_is_collected() -> None:
    """The threshold alone changes nothing, whatever the device has; torch 2.13 asks for a fraction below 1."""
    for conf in ("garbage_collection_threshold:0.1", "garbage_collection_threshold:0.1,per_process_memory_fraction:1"):
        settings = parse_settings(conf)
        assert "has no effect" in settings.notes[0]
        allocator = CachingAllocator(settings.on_device(1000 * MIB), 1000 * MIB)
        for size in (30, 50, 70, 90):
            allocator.free(allocator.malloc(size * MIB)[0])
        assert allocator.reserved == 240 * MIB


def test_a_block_s_age_counts_the_searches_of_every_stream() -> None:
    """The block of a stream that has searched no more is the oldest: it goes, and the younger ones stay."""
    conf = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.5"
    allocator, events = recorded(conf, total=400 * MIB)
    allocator.free(allocator.malloc(80 * MIB, stream=7)[0])
    for _ in range(5):
        allocator.free(allocator.malloc(40 * MIB)[0])
    allocator.malloc(70 * MIB)
    assert [size for action, size in events if action == "segment_free"] == [80 * MIB]


def test_a_memory_fraction_is_a_limit() -> None:
    """torch compares it with a whole segment's bytes, also where an expandable segment would need fewer pages."""
    for conf in ("per_process_memory_fraction:0.5", "per_process_memory_fraction:0.5,expandable_segments:True"):
        allocator = CachingAllocator(parse_settings(conf).on_device(200 * MIB), 1000 * MIB)
        allocator.malloc(90 * MIB)
        with pytest.raises(AllocatorOutOfMemory) as full:
            allocator.malloc(11 * MIB)
        assert full.value.free == 1000 * MIB - allocator.reserved


def test_expandable_segments_grow_in_place_and_give_pages_back() -> None:
    allocator, events = recorded("expandable_segments:True", capacity=400 * MIB)
    first, size = allocator.malloc(15 * MIB)
    assert size == 15 * MIB
    second, _ = allocator.malloc(100 * MIB)
    assert second == first + 15 * MIB, "one range that grows"
    assert allocator.reserved == 120 * MIB
    assert [(a, s) for a, s in events if a == "segment_map"] == [("segment_map", 20 * MIB), ("segment_map", 100 * MIB)]
    allocator.free(second)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB, "only whole pages go back"
    allocator.free(first)
    allocator.empty_cache()
    assert allocator.reserved == 0
    assert allocator.segments() == []
    allocator.malloc(390 * MIB)
    assert allocator.max_reserved == 400 * MIB


def test_settings_strings() -> None:
    parsed = parse_settings(
        "max_split_size_mb:512, garbage_collection_threshold:0.8,expandable_segments:True,backend:native,"
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],large_segment_size_mb:32"
    )
    assert parsed.max_split_size == 512 * MIB
    assert parsed.garbage_collection_threshold == 0.8
    assert parsed.expandable_segments
    assert parsed.large_segment_size == 32 * MIB
    assert parsed.roundup_divisions == (1,) * 9 + (2, 4, 8, 8, 8, 8, 8)
    assert parse_settings("roundup_power2_divisions:4").round_size(1200 * 1024) == 1280 * 1024
    assert parse_settings("") == AllocatorSettings()
    for bad in (
        "max_split_size_mb",
        "max_split_size_mb:x",
        "roundup_power2_divisions:3",
        "a:b:c",
        "max_split_size_mb:5",
        "max_split_size_mb:32,large_segment_size_mb:64",
        "max_non_split_rounding_mb:32,large_segment_size_mb:64",
        "large_segment_size_mb:10",
        "garbage_collection_threshold:1",
        "expandable_segments:true",
        "backend:other",
        "pinned_num_register_threads:256",
        "per_process_memory_fraction:1.5",
    ):
        with pytest.raises(UsageError):
            parse_settings(bad)


def test_a_setting_that_torch_does_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match=r"torch has no allocator setting banana and raises an error: remove it\."):
        parse_settings("banana:1")
    with pytest.raises(UsageError, match="near it: max_split_size_mb"):
        parse_settings("max_split_size:128")


def test_a_setting_that_changes_memory_and_is_not_modelled_is_a_note() -> None:
    quiet = "backend:native,pinned_use_background_threads:True,per_process_memory_fraction:0.5,max_split_size_mb:32"
    assert parse_settings(quiet).notes == ()
    notes = parse_settings("pinned_max_cached_size_mb:64,backend:cudaMallocAsync").notes
    assert [note.partition(" is not modelled: ")[0] for note in notes] == [
        "The allocator setting pinned_max_cached_size_mb:64",
        "The allocator setting backend:cudaMallocAsync",
    ]


@settings(max_examples=150, deadline=None)
@given(programs())
def test_invariants(program: Program) -> None:
    """Blocks tile their segments, counters equal sums, and free neighbours do not exist."""
    allocator = program.allocator
    used = requested = reserved = 0
    for segment in allocator.segments():
        at = segment["address"]
        previous = ""
        for block in segment["blocks"]:
            assert block["address"] == at
            assert block["size"] % 512 == 0
            assert not (previous == block["state"] == "inactive")
            at += block["size"]
            previous = block["state"]
            if previous != "inactive":
                used += block["size"]
                requested += block["requested_size"]
                assert block["requested_size"] <= block["size"]
        assert at == segment["address"] + segment["total_size"]
        reserved += segment["total_size"]
    assert (used, requested, reserved) == (allocator.active, allocator.requested, allocator.reserved)
    for address in program.live:
        allocator.free(address)
    pending = allocator.active
    allocator.empty_cache()
    if not pending and not any(s["segment_pool_id"] != (0, 0) for s in allocator.segments()):
        assert allocator.reserved == 0


class _Recorded(Addresses):
    """Give segments the addresses they had in a recording, in order: what is not the allocator's own is left out."""

    def __init__(self, addresses: list[int]) -> None:
        self._recorded = iter(addresses)

    def take(self, size: int) -> int:
        return next(self._recorded)

    def give_back(self, address: int, size: int) -> None:
        pass


def replay(path: Path) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """The segment events in a file, and those of the model when it is given the same requests."""
    snapshot = load_snapshot(path)
    device = snapshot.devices[0]
    trace = snapshot.traces[device]
    made: list[tuple[str, int]] = []
    seen: list[tuple[str, int]] = []

    def note(action: str, address: int, size: int, stream: int, pool: int) -> None:
        if action.startswith("segment"):
            made.append((action, size))

    recorded = _Recorded(trace.address[trace.action == Action.SEGMENT_ALLOC].tolist())
    allocator = CachingAllocator(settings_of(snapshot.settings), on_event=note, addresses=recorded)
    address_of: dict[int, int] = {}
    for action, address, size, stream in zip(
        trace.action.tolist(), trace.address.tolist(), trace.size.tolist(), trace.stream.tolist(), strict=True
    ):
        if action == Action.ALLOC:
            address_of[address], _ = allocator.malloc(size, stream)
        elif action == Action.FREE_COMPLETED:
            allocator.free(address_of.pop(address))
        elif action in (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE):
            seen.append((Action(action).name.lower(), size))
    return seen, made


def test_complete_recordings_replayed(shared: Path) -> None:
    """From requests and the driver's addresses: the same segments, in the same order, as were recorded."""
    count = 0
    for path in sorted([*(shared / "snapshots").glob("*.pickle"), *(shared / "truth").glob("*.pickle")]):
        snapshot = load_snapshot(path)
        if build_timeline(snapshot, snapshot.devices[0]).history is not History.COMPLETE:
            continue
        seen, made = replay(path)
        assert made == seen, path.name
        count += len(seen)
    assert count > 1000


def test_of_equal_free_blocks_torch_s_release_says_which_is_taken() -> None:
    """Newer segments lie lower here: the lowest address is the newest segment's, and torch 2.13 takes the oldest's."""
    for oldest_first in (True, False):
        heap = CachingAllocator(replace(parse_settings(""), oldest_first=oldest_first))
        made = [heap.malloc(32 * MIB)[0] for _ in range(3)]
        assert made == sorted(made, reverse=True)
        for address in (made[1], made[0], made[2]):
            heap.free(address)
        assert [heap.malloc(32 * MIB)[0] for _ in range(3)] == (made if oldest_first else made[::-1])


def test_a_snapshot_tells_which_free_block_is_taken() -> None:
    assert settings_of({"oldest_first": False, "max_cached_size": -1}).oldest_first is False
    assert settings_of({"max_cached_size": -1}).oldest_first is True  # torch 2.13
    assert settings_of({"max_split_size": -1}).oldest_first is False  # torch 2.11
