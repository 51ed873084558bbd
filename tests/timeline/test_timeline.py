"""Lifetimes and totals, against the allocator's own counters and against other people's snapshots."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memprof.allocator.settings import AllocatorSettings, settings_of
from memprof.errors import InputError
from memprof.snapshot import load_snapshot, snapshot_from_raw
from memprof.timeline.block_sizes import block_sizes
from memprof.timeline.lifetimes import pair_blocks
from memprof.timeline.segment_layout import idle_memory
from memprof.timeline.timeline import Timeline, build_timeline
from memprof.vocabulary import History
from tests.snapshot.programs import MIB, Program, programs
from tests.synthetic import SnapshotBuilder

relaxed = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def totals_of(timeline: Timeline) -> np.ndarray:
    assert timeline.reserved is not None
    return np.stack([timeline.active, timeline.allocated, timeline.requested_total, timeline.reserved], axis=1)


def check_conservation(timeline: Timeline) -> None:
    """What is alive adds up to the totals at every instant, and nothing overlaps."""
    for instant in range(timeline.n_events + 1):
        rows = timeline.alive_at(instant)
        assert timeline.size[rows].sum() == timeline.active[instant]
        assert timeline.requested[rows].sum() == timeline.requested_total[instant]
    order = np.lexsort((timeline.alloc_event, timeline.address))
    same = timeline.address[order][1:] == timeline.address[order][:-1]
    assert np.all(timeline.free_event[order][:-1][same] <= timeline.alloc_event[order][1:][same])


@relaxed
@given(programs(), st.integers(1, 9), st.floats(0, 1))
def test_rows_alive_are_those_that_began_and_did_not_end(program: Program, part: int, fraction: float) -> None:
    snapshot = snapshot_from_raw(program.raw(int(fraction * len(program.events))))
    if not snapshot.devices:
        return
    timeline = build_timeline(snapshot)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memprof.timeline.timeline._PART", part)
        for instant in range(timeline.n_events + 1):
            alive = (timeline.alloc_event < instant) & (instant <= timeline.free_event)
            np.testing.assert_array_equal(timeline.alive_at(instant), np.flatnonzero(alive))


@relaxed
@given(programs())
def test_a_complete_history_gives_the_allocators_own_totals(program: Program) -> None:
    """Block sizes included: those of freed blocks are recovered, and are what the allocator gave."""
    if not program.events:
        return
    timeline = build_timeline(snapshot_from_raw(program.raw()), 0)
    for event, size in program.block_size.items():
        rows = np.flatnonzero(timeline.alloc_event == event)
        assert timeline.size[rows].tolist() == [size]
    assert totals_of(timeline)[1:].tolist() == [list(t) for t in _settled(program)]
    check_conservation(timeline)


def _settled(program: Program) -> list[tuple[int, int, int, int]]:
    """Totals as of each event.

    The model emits an alloc after counting it and a free before its counters drop, as for segments;
    what the timeline says of an instant is what holds when the event is over.
    """
    active = allocated = requested = reserved = 0
    sizes: dict[int, tuple[int, int]] = {}
    out = []
    for index, event in enumerate(program.events):
        action, size = event["action"], event["size"]
        block = sizes.get(event.get("addr", -1), (0, 0))
        if action == "alloc":
            sizes[event["addr"]] = (program.block_size[index], size)
            active, allocated, requested = (
                active + program.block_size[index],
                allocated + program.block_size[index],
                requested + size,
            )
        elif action == "free_requested":
            allocated -= block[0]
        elif action == "free_completed":
            active, requested = active - block[0], requested - block[1]
        elif action in ("segment_alloc", "segment_map"):
            reserved += size
        elif action in ("segment_free", "segment_unmap"):
            reserved -= size
        out.append((active, allocated, requested, reserved))
    return out


@relaxed
@given(programs(), st.floats(0, 1))
def test_a_late_start_gives_the_same_totals(program: Program, fraction: float) -> None:
    """What was allocated before recording counts, whether it lived to the end or was freed."""
    start = int(fraction * len(program.events))
    snapshot = snapshot_from_raw(program.raw(start))
    if not snapshot.devices:
        return
    timeline = build_timeline(snapshot, 0)
    check_conservation(timeline)
    truth = np.array([(0, 0, 0, 0), *_settled(program)])[start:]
    got = totals_of(timeline)
    assert got[:, 2].tolist() == truth[:, 2].tolist(), "requested"
    assert got[:, 3].tolist() == truth[:, 3].tolist(), "reserved"
    # The only unknown: the unsplit rest of a block made before and freed during the recording.
    unknown = (timeline.alloc_event < 0) & (timeline.free_event < timeline.n_events)
    if not np.any(unknown & (timeline.requested > MIB)):
        assert got[:, 0].tolist() == truth[:, 0].tolist(), "active"


@relaxed
@given(programs())
def test_idle_memory_is_split_without_rest(program: Program) -> None:
    if not program.events:
        return
    snapshot = snapshot_from_raw(program.raw())
    timeline = build_timeline(snapshot, 0)
    split = idle_memory(timeline)
    assert timeline.reserved is not None
    for instant in range(timeline.n_events + 1):
        parts = split(instant)
        assert min(parts.values()) >= 0
        assert sum(parts.values()) == timeline.reserved[instant] - timeline.active[instant]
    end = {"cached": 0, "inactive_split": 0, "private_pools": 0}
    if program.settings.expandable_segments:
        return
    for segment in program.raw()["segments"]:
        idle = segment["total_size"] - segment["active_size"]
        if segment["segment_pool_id"] != (0, 0):
            end["private_pools"] += idle
        else:
            end["inactive_split" if segment["active_size"] else "cached"] += idle
    assert split(timeline.n_events) == end


def test_peaks_of_real_snapshots(shared: Path) -> None:
    """Every device of every file, to the byte; the end of the timeline is the final state."""
    expected: dict[str, Any] = json.loads((shared / "snapshots" / "peaks.json").read_text())
    assert len(expected) > 15
    for name, facts in expected.items():
        snapshot = load_snapshot(shared / "snapshots" / name)
        peaks = {str(d): build_timeline(snapshot, d).max_requested for d in snapshot.devices}
        assert peaks == facts["max_requested_bytes"], name
        timeline = build_timeline(snapshot)
        assert timeline.reserved is not None
        assert timeline.active[-1] == facts["active_end"], name
        if not name.startswith("SYNTHETIC"):  # a made-up file whose blocks exceed its segments
            assert timeline.reserved[-1] == facts["reserved_end"], name
            assert timeline.reserved[-1] == snapshot.segments[timeline.device].total.sum()


def test_what_lives_at_the_peak_of_labelled_snapshots(shared: Path) -> None:
    for file in sorted((shared / "truth").glob("*.pickle")):
        truth = json.loads(gzip.decompress(Path(f"{file}.truth.json.gz").read_bytes()))["peak"]
        timeline = build_timeline(load_snapshot(file))
        instant = truth["entry"] + 1
        rows = timeline.alive_at(instant)
        assert timeline.max_requested == timeline.requested_total[instant] == truth["allocated_bytes"]
        got = sorted(zip(timeline.address[rows].tolist(), timeline.requested[rows].tolist(), strict=True))
        assert got == sorted((entry[0], entry[1]) for entry in truth["live"])


def test_recovered_sizes_agree_with_the_blocks_real_allocators_left(shared: Path) -> None:
    """Hide the final blocks of real files: the rules give back the sizes that torch's allocator chose."""
    checked = slack = 0
    for file in sorted((shared / "snapshots").glob("cs336-*.pickle")):
        snapshot = load_snapshot(file)
        for device in snapshot.traces:
            timeline = build_timeline(snapshot, device)
            blocks = snapshot.blocks[device]
            born = (timeline.alloc_event >= 0) & (timeline.free_event == timeline.n_events)
            known = {int(timeline.alloc_event[r]): int(timeline.size[r]) for r in np.flatnonzero(born)}
            rows = pair_blocks(snapshot.traces[device], blocks, snapshot.segments[device], [])
            requested = np.where(rows.block_size >= 0, rows.block_requested, rows.trace_size)
            seen = (rows.alloc_event >= 0) & (rows.block_size >= 0)
            rows.block_size[seen] = -1
            sizes, _ = block_sizes(rows, requested, timeline.regions, settings_of(snapshot.settings))
            for row in np.flatnonzero(seen):
                assert sizes[row] == known[int(rows.alloc_event[row])], file.name
                slack += int(sizes[row]) > -(-int(requested[row]) // 512) * 512
                checked += 1
    assert checked > 1000
    assert slack > 10, "some blocks must be larger than their rounded request, or this proves little"


@pytest.fixture
def program() -> Program:
    """Three blocks made, the first freed again."""
    run = Program(AllocatorSettings()).run([("malloc", 700, 0, 0), ("malloc", 5 * MIB, 0, 0), ("malloc", 9, 0, 0)])
    return run.run([("free", 0, 0, 0)])


def test_history(program: Program) -> None:
    def history(raw: dict[str, Any]) -> History:
        return build_timeline(snapshot_from_raw(raw), 0).history

    assert history(program.raw()) is History.COMPLETE
    assert history(program.raw(3)) is History.STARTED_LATE
    assert history(program.raw() | {"device_traces": [[]]}) is History.NONE
    assert history(program.raw(3) | {"memprof": {"recorded": {"history": "truncated"}}}) is History.TRUNCATED
    ring = Program(AllocatorSettings()).run([("malloc", 512, 0, 0), ("free", 0, 0, 0)] * 400)
    cut = len(ring.events) - 1000
    assert cut > 0
    raw = ring.raw(cut)
    if raw["device_traces"][0][0]["action"] == "alloc":
        raw["device_traces"][0] = ring.events[cut + 1 :] + ring.events[-3:-2]
    assert history(raw) is History.TRUNCATED


def test_instants_and_times(program: Program) -> None:
    timeline = build_timeline(snapshot_from_raw(program.raw()), 0)
    first = int(timeline.alloc_event[0])
    row = timeline.alive_at(first + 1)
    assert timeline.requested[row].tolist() == [700]
    assert not len(timeline.alive_at(first))
    assert timeline.time_us(first + 1) == 10 * first
    assert timeline.instant_at(10 * first) == first + 1
    assert timeline.instant_at(10 * first - 1) == first
    assert timeline.died_us[0] == 10 * int(timeline.free_event[0])
    assert timeline.died_us[1] == -1


_EXACT = st.sampled_from([512, MIB, 10 * MIB, 20 * MIB, 64 * MIB])  # no block is larger than its request
_steps = st.one_of(
    st.tuples(st.just("malloc"), _EXACT, st.just(0), st.just(0)),
    st.tuples(st.sampled_from(["free", "pend", "pend", "done"]), st.integers(0, 99), st.just(0), st.just(0)),
)


@relaxed
@given(st.lists(_steps, min_size=2, max_size=40), st.integers(0, 99))
def test_a_recording_that_begins_anywhere_has_torch_s_totals(steps: list[tuple[str, int, int, int]], cut: int) -> None:
    """A block whose free was requested before the recording began is pending from its start, not allocated."""
    program = Program(AllocatorSettings()).run(steps)
    allocated, active = [0], [0]
    for event in program.events:
        gain = {"alloc": (1, 1), "free_requested": (-1, 0), "free_completed": (0, -1)}.get(event["action"], (0, 0))
        allocated.append(allocated[-1] + gain[0] * event["size"])
        active.append(active[-1] + gain[1] * event["size"])
    if not program.events:
        return
    start = cut % (len(program.events) + 1)
    timeline = build_timeline(snapshot_from_raw(program.raw(start)), 0)
    assert timeline.active.tolist() == active[start:]
    assert timeline.allocated.tolist() == allocated[start:]


def test_a_trace_without_requests_does_not_show_pending_blocks() -> None:
    """Its recorder skipped them, as a block made in it shows: a block is allocated until its free has completed."""
    program = Program(AllocatorSettings()).run(
        [("malloc", 512, 0, 0), ("malloc", 512, 0, 0), ("free", 0, 0, 0), ("malloc", MIB, 0, 0), ("free", 1, 0, 0)]
    )
    raw = program.raw(3)
    raw["device_traces"][0] = [e for e in raw["device_traces"][0] if e["action"] != "free_requested"]
    timeline = build_timeline(snapshot_from_raw(raw), 0)
    assert timeline.allocated.tolist() == [1024, 512, MIB + 512, 512]
    assert not any("request to free" in note for note in timeline.notes)


def test_frees_of_which_no_request_is_seen_are_pending_with_a_note() -> None:
    """A ring that kept nothing but two completions, as of blocks that other streams used until then."""
    steps = [("malloc", 512, 0, 0), ("malloc", 512, 0, 0), ("pend", 0, 0, 0), ("pend", 0, 0, 0)]
    program = Program(AllocatorSettings()).run([*steps, ("done", 0, 0, 0), ("done", 0, 0, 0)])
    timeline = build_timeline(snapshot_from_raw(program.raw(len(program.events) - 2)), 0)
    assert timeline.allocated.tolist() == [0, 0, 0]
    assert timeline.active.tolist() == [1024, 512, 0]
    assert sum("completes 2 frees and shows no request to free" in note for note in timeline.notes) == 1


@relaxed
@given(programs())
def test_pools_of_old_traces(program: Program) -> None:
    """Events without pool ids: what is in a private pool's segment belongs to the pool."""
    raw = program.raw()
    if not program.events:
        return
    new = build_timeline(snapshot_from_raw(raw), 0)
    pools = [event.pop("pool_id") for event in raw["device_traces"][0]]
    old = build_timeline(snapshot_from_raw(raw), 0)
    given_back = any(e["action"] in ("segment_free", "segment_unmap") for e in program.events)
    assert any(pool != (0, 0) for pool in pools) or not np.any(old.pool)
    if not given_back:
        assert old.pool.tolist() == new.pool.tolist()
        assert old.regions.pool.tolist() == new.regions.pool.tolist()


def test_a_trace_without_allocator() -> None:
    trace = [
        {"action": "alloc", "addr": 64, "size": 100, "stream": 0, "time_us": 1, "frames": []},
        {"action": "alloc", "addr": 256, "size": 7, "stream": 0, "time_us": 2, "frames": []},
        {"action": "free_requested", "addr": 64, "size": 100, "stream": 0, "time_us": 3, "frames": []},
        {"action": "free_completed", "addr": 64, "size": 100, "stream": 0, "time_us": 3, "frames": []},
    ]
    raw = {"segments": [], "device_traces": [trace], "memprof": {"kind": "trace"}}
    timeline = build_timeline(snapshot_from_raw(raw))
    assert timeline.reserved is None
    assert timeline.active.tolist() == [0, 100, 107, 107, 7]
    assert timeline.allocated.tolist() == [0, 100, 107, 7, 7]
    assert timeline.size.tolist() == timeline.requested.tolist() == [100, 7]
    assert timeline.free_event.tolist() == [3, 4]


def test_block_sizes_in_the_trace_are_noticed() -> None:
    """Some recorders write block sizes: the final blocks show it."""
    run = Program(AllocatorSettings()).run([("malloc", 700, 0, 0)] * 4 + [("free", 0, 0, 0)])
    raw = run.raw()
    for event in raw["device_traces"][0]:
        if event["action"] in ("alloc", "free_requested", "free_completed"):
            event["size"] = 1024
    timeline = build_timeline(snapshot_from_raw(raw), 0)
    assert timeline.size.tolist() == [1024] * 4
    assert timeline.requested.tolist() == [1024, 700, 700, 700]
    assert any("block sizes" in note for note in timeline.notes)


def test_contradictions_are_said_not_hidden(program: Program) -> None:
    raw = program.raw()
    raw["segments"] = []
    timeline = build_timeline(snapshot_from_raw(raw), 0)
    check_conservation(timeline)
    lost = [e for e in program.raw()["device_traces"][0] if e["action"] != "free_completed"]
    lost += [dict(e) for e in lost if e["action"] == "alloc"]
    timeline = build_timeline(snapshot_from_raw({"segments": [], "device_traces": [lost]}), 0)
    check_conservation(timeline)
    assert any("contradicts" in note for note in timeline.notes)


def test_the_default_device_is_the_one_with_the_highest_peak(program: Program) -> None:
    raw = program.raw()
    raw["device_traces"] = [[], *raw["device_traces"], [dict(e) for e in raw["device_traces"][0][:3]]]
    for segment in raw["segments"]:
        segment["device"] = 1
    snapshot = snapshot_from_raw(raw)
    assert snapshot.devices == [1, 2]
    assert build_timeline(snapshot).device == 1
    with pytest.raises(InputError, match="nothing on device 0; it has 1, 2"):
        build_timeline(snapshot, 0)
    with pytest.raises(InputError, match="no events and no segments"):
        build_timeline(snapshot_from_raw({"segments": [], "device_traces": []}))


@pytest.mark.parametrize(("kind", "words"), [("cuda", "sleep mode"), ("simulated", "would reserve")])
def test_more_reserved_than_there_is_is_said_and_why(tmp_path: Path, kind: str, words: str) -> None:
    run = SnapshotBuilder()
    run.alloc(64 << 20, "forward")
    extra = {"schema": "memprof.snapshot/1", "kind": kind, "device": {"index": 0, "total_bytes": 32 << 20}}
    notes = build_timeline(load_snapshot(run.save(tmp_path / "run.pickle", extra))).notes
    assert [note for note in notes if words in note and "33,554,432" in note]
