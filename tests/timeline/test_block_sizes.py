"""Block sizes looked up at once, against the same rules applied event by event."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.allocator.model import CachingAllocator
from memprof.allocator.settings import AllocatorSettings, parse_settings, settings_of
from memprof.snapshot import Action, Snapshot, load_snapshot, snapshot_from_raw
from memprof.timeline.block_sizes import round_sizes
from memprof.timeline.segment_layout import idle_memory
from memprof.timeline.timeline import Timeline, build_timeline

MIB = 2**20


def replayed(snapshot: Snapshot, timeline: Timeline) -> dict[int, int]:
    """The size of the block each alloc event made: it ends at the next block in use or its segment's end."""
    trace, regions = snapshot.traces[timeline.device], timeline.regions
    settings = settings_of(snapshot.settings)
    there = regions.begin_event < 0
    ends = sorted((regions.address + regions.size)[there].tolist())
    live = sorted(timeline.address[timeline.alloc_event < 0].tolist())
    sizes: dict[int, int] = {}
    for index, (action, address, size) in enumerate(
        zip(trace.action.tolist(), trace.address.tolist(), trace.size.tolist(), strict=True)
    ):
        if action == Action.ALLOC:
            block = settings.round_size(size)
            if block > MIB:
                after = [places[at] for places in (live, ends) if (at := bisect_right(places, address)) < len(places)]
                rest = min(after, default=1 << 62) - address - block
                block += rest if rest <= MIB else 0
            sizes[index] = block
            insort(live, address)
        elif action == Action.FREE_COMPLETED:
            live.remove(address) if address in live[bisect_left(live, address) :][:1] else None
        elif action == Action.SEGMENT_ALLOC:
            insort(ends, address + size)
        elif action == Action.SEGMENT_FREE:
            ends.remove(address + size)
    return sizes


def test_every_allocation_of_real_traces(shared: Path) -> None:
    checked = slack = 0
    for file in sorted((shared / "snapshots").glob("*.pickle")):
        snapshot = load_snapshot(file)
        for device in snapshot.traces:
            if np.any(snapshot.segments[device].expandable):
                continue
            timeline = build_timeline(snapshot, device)
            want = replayed(snapshot, timeline)
            rows = np.flatnonzero(timeline.alloc_event >= 0)
            assert {int(timeline.alloc_event[r]): int(timeline.size[r]) for r in rows} == want, file.name
            checked += len(want)
            slack += int(timeline.size.sum() - round_sizes(AllocatorSettings(), timeline.requested).sum())
    assert checked > 40_000
    assert slack > 500 * MIB, "blocks larger than their rounded request are what this is about"


@given(st.lists(st.integers(1, 1 << 36), min_size=1), st.sampled_from([0, 1, 2, 4, 8]))
def test_rounding_of_many_is_rounding_of_each(sizes: list[int], divisions: int) -> None:
    settings = AllocatorSettings(roundup_divisions=(divisions,) * 16)
    assert round_sizes(settings, np.array(sizes)).tolist() == [settings.round_size(s) for s in sizes]


def _recorded(conf: str) -> tuple[CachingAllocator, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    allocator = CachingAllocator(parse_settings(conf))

    def note(action: str, address: int, size: int, stream: int, pool: int) -> None:
        events.append({"action": action, "addr": address, "size": size, "stream": stream, "frames": []})
        events[-1]["time_us"] = len(events)

    allocator.on_event = note
    return allocator, events


def _as_torch_writes(allocator: CachingAllocator, events: list[dict[str, Any]], conf: str) -> Timeline:
    """Of these settings, torch writes two only in the text of the environment variable."""
    settings = {"PYTORCH_CUDA_ALLOC_CONF": conf, "max_cached_size": -1}
    settings |= {"expandable_segments": allocator.settings.expandable_segments}
    raw = {"segments": allocator.segments(), "device_traces": [events], "allocator_settings": settings}
    return build_timeline(snapshot_from_raw(raw), 0)


@pytest.mark.parametrize("conf", ["max_split_size_mb:64", "max_split_size_mb:64,max_non_split_rounding_mb:512"])
def test_freed_blocks_keep_what_the_settings_text_lets_them(conf: str) -> None:
    """100 MiB may take a whole free block of 500 MiB only if a recording's text allows so much rounding."""
    allocator, events = _recorded(conf)
    allocator.free(allocator.malloc(500 * MIB)[0])
    one, two = allocator.malloc(100 * MIB)[0], allocator.malloc(300 * MIB)[0]
    allocator.free(one)
    allocator.free(two)
    allocator.malloc(MIB)
    timeline = _as_torch_writes(allocator, events, conf)
    assert timeline.allocated.max() == allocator.max_allocated
    assert timeline.reserved is not None
    assert timeline.reserved.max() == allocator.max_reserved


@pytest.mark.parametrize("conf", ["", ",large_segment_size_mb:64", ",large_segment_size_mb:12"])
def test_cached_pages_are_those_that_emptying_the_cache_frees(conf: str) -> None:
    conf = "expandable_segments:True" + conf
    allocator, events = _recorded(conf)
    allocator.malloc(30 * MIB)
    gone = allocator.malloc(90 * MIB)[0]
    allocator.malloc(4 * MIB)
    allocator.free(gone)
    timeline = _as_torch_writes(allocator, list(events), conf)
    before = allocator.reserved
    allocator.empty_cache()
    assert idle_memory(timeline)(timeline.n_events)["cached"] == before - allocator.reserved
