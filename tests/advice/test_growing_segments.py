"""What growing segments are promised to save, held to the allocator's model running the same program with them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from memprof.advice.analyze_with_advice import analyze
from memprof.advice.estimate import saved_by_growing
from memprof.allocator.model import CachingAllocator
from memprof.allocator.settings import parse_settings
from memprof.snapshot.reader import snapshot_from_raw
from tests.report.plain import estimated_advice

MIB = 2**20
GROWING = "expandable_segments:True"

Program = Callable[[CachingAllocator], Any]


def recorded(program: Program, before: Program | None = None, text: str = "") -> Any:
    """A program's snapshot, read."""
    return snapshot_from_raw(recorded_raw(program, before, text))


def recorded_raw(program: Program, before: Program | None = None, text: str = "") -> dict[str, Any]:
    """A program's snapshot, as torch would write it: events with addresses, and the final segments."""
    events: list[dict[str, Any]] = []
    allocator = CachingAllocator(parse_settings(text))
    if before is not None:
        before(allocator)

    def note(action: str, address: int, size: int, stream: int, pool: int) -> None:
        row = {"action": action, "addr": address, "size": size, "stream": stream, "frames": []}
        events.append({**row, "time_us": len(events), "segment_pool_id": (0, pool)})

    allocator.on_event = note
    program(allocator)
    settings = {"expandable_segments": allocator.settings.expandable_segments}
    return {"segments": allocator.segments(), "device_traces": [events], "allocator_settings": settings}


def growing(*programs: Program) -> int:
    """The reserved peak of the same programs with growing segments."""
    allocator = CachingAllocator(parse_settings(GROWING))
    for program in programs:
        program(allocator)
    return allocator.max_reserved


def promised(snapshot: Any) -> tuple[int, int | None]:
    """The recorded peak of reserved bytes, and what the advice says that growing segments save of it."""
    report = analyze(snapshot).to_dict()
    entries = [e for e in report["advice"] if e["id"] == "expandable_segments"]
    assert all((e["peak"], e["basis"]) == ("device", "estimated") for e in entries)
    saves = entries[0]["saves_bytes"] if entries else None
    # A report that is read again says what the replay said.
    again = [e for e in estimated_advice(report) if e["id"] == "expandable_segments"]
    assert [e["saves_bytes"] for e in again] == [e["saves_bytes"] for e in entries]
    return report["device_peak"]["reserved_bytes"], saves


def lengths_that_grow(allocator: CachingAllocator) -> None:
    """What transformers' cache does: each token's tensors are a little larger, and fit no earlier block."""
    for n in range(40, 90):
        held = [allocator.malloc(n * MIB + layer * 3 * MIB)[0] for layer in range(4)]
        for address in held:
            allocator.free(address)


def weights(allocator: CachingAllocator) -> None:
    for n in (30, 7, 200, 5, 60):
        allocator.malloc(n * MIB)


def steps_with_flushes(allocator: CachingAllocator) -> None:
    draw = random.Random(3)
    for _ in range(6):
        alive = [allocator.malloc(draw.randrange(1, 40 * MIB), draw.choice((0, 0, 7)))[0] for _ in range(60)]
        draw.shuffle(alive)
        for address in alive[:40]:
            allocator.free(address)
        alive = alive[40:] + [allocator.malloc(draw.randrange(1, 90 * MIB))[0] for _ in range(10)]
        for address in alive:
            allocator.free(address)
        allocator.empty_cache()


@pytest.mark.parametrize("program", [lengths_that_grow, steps_with_flushes])
def test_the_promise_is_what_a_replay_yields(program: Program) -> None:
    reserved, saves = promised(recorded(program))
    assert saves == reserved - growing(program) > 0


def test_what_was_there_before_the_recording_counts() -> None:
    reserved, saves = promised(recorded(lengths_that_grow, before=weights))
    assert saves == reserved - growing(weights, lengths_that_grow) > 0


def test_what_was_reserved_before_may_all_have_been_needed() -> None:
    """An earlier peak left segments that are cached now. That nothing uses them any more promises nothing."""

    def before(allocator: CachingAllocator) -> None:
        for address in [allocator.malloc(300 * MIB)[0] for _ in range(5)]:
            allocator.free(address)

    reserved, saves = promised(recorded(lambda allocator: allocator.malloc(5 * MIB), before=before))
    assert reserved == 5 * 300 * MIB
    assert saves is None


def a_small_run_on_many_streams(allocator: CachingAllocator) -> None:
    """Blocks of 10 MiB have a segment of their own size; growing segments take a page of 20 MiB on each stream."""
    for stream in range(8):
        allocator.malloc(10 * MIB, stream)
    idle = [allocator.malloc(5 * MIB)[0] for _ in range(8)]
    for address in idle[1::2] + idle[2::4]:
        allocator.free(address)


def test_idle_memory_alone_promises_nothing() -> None:
    """Four blocks' worth lies idle between blocks, and growing segments would need more, not less."""
    snapshot = recorded(a_small_run_on_many_streams)
    report = analyze(snapshot).to_dict()
    reserved, saves = promised(snapshot)
    assert growing(a_small_run_on_many_streams) > reserved
    assert saves is None
    assert report["device_peak"]["reserved_bytes"] == reserved


def test_growing_segments_are_judged_within_the_memory_fraction_of_their_own_device() -> None:
    """Half of 8 GiB on device 1, the one recorded, not half of device 0's 400 MiB."""
    text = "per_process_memory_fraction:0.5,garbage_collection_threshold:0.4"
    raw = recorded_raw(lengths_that_grow)
    raw["device_traces"] = [[], raw["device_traces"][0]]
    for segment in raw["segments"]:
        segment["device"] = 1
    raw["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = text
    sizes = {0: 400 * MIB, 1: 8192 * MIB}
    raw["memprof"] = {
        "device": {"index": 0, "total_bytes": sizes[0]},
        "devices": [{"index": index, "total_bytes": total} for index, total in sizes.items()],
    }
    analysis = analyze(snapshot_from_raw(raw))
    allocator = CachingAllocator(replace(parse_settings(f"{text},{GROWING}"), allowed_bytes=4096 * MIB))
    lengths_that_grow(allocator)
    assert analysis.timeline.reserved is not None
    assert saved_by_growing(analysis) == int(analysis.timeline.reserved.max()) - allocator.max_reserved > 0

    for device in raw["memprof"]["devices"]:
        device["total_bytes"] = sizes[0]
    assert saved_by_growing(analyze(snapshot_from_raw(raw))) is None, "what a limit does not allow cannot be promised"


def test_segments_that_grow_already_are_left_alone() -> None:
    snapshot = recorded(lengths_that_grow, text=GROWING)
    assert promised(snapshot)[1] is None
    assert saved_by_growing(analyze(snapshot)) is None
