"""Every layout torch has written, read to the same columns."""

from __future__ import annotations

import gzip
import json
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from memprof.allocator.settings import AllocatorSettings
from memprof.analysis.analysis import analyze
from memprof.errors import InputError
from memprof.snapshot import Action, BlockState, Frame, load_snapshot, snapshot_from_raw
from memprof.snapshot.recorded_run import (
    Annotation,
    EngineSwitch,
    FailedAllocation,
    Holder,
    HostMemory,
    Interval,
    MemorySample,
    OutsideTorch,
    Owner,
    PhaseMark,
    RecordedHistory,
    RecordedRun,
    StepMark,
)
from memprof.snapshot.unpickle import plain_from_bytes
from memprof.snapshot.writer import save_snapshot
from memprof.timeline.timeline import build_timeline
from memprof.vocabulary import Category, Kind, Phase
from tests.snapshot.programs import MIB, Program, raised


@pytest.fixture
def raw() -> dict[str, Any]:
    """Two pools, two streams, a pending free, a freed block."""
    steps = [("malloc", 700, 0, 0), ("malloc", 5 * MIB, 0, 0), ("malloc", 9, 7, 1), ("malloc", 3000, 0, 0)]
    return Program(AllocatorSettings()).run([*steps, ("free", 0, 0, 0), ("pend", 0, 0, 0)]).raw()


def peaks(raw: dict[str, Any] | list[Any]) -> tuple[int, int]:
    timeline = build_timeline(snapshot_from_raw(raw))
    return timeline.max_requested, int(timeline.active[-1])


def test_the_usual_form(raw: dict[str, Any], tmp_path: Path) -> None:
    want = pickle.loads(pickle.dumps(raw))
    snapshot = load_snapshot(save_snapshot(raw, tmp_path / "a" / "s.pickle"))
    trace = snapshot.traces[0]
    assert snapshot.devices == [0]
    assert [Action(a).name.lower() for a in trace.action] == [e["action"] for e in want["device_traces"][0]]
    assert trace.size.tolist() == [e["size"] for e in want["device_traces"][0]]
    assert [snapshot.pools[p] for p in trace.pool] == [e["pool_id"] for e in want["device_traces"][0]]
    for index, event in enumerate(want["device_traces"][0]):
        frames = [Frame(f["filename"], f["line"], f["name"]) for f in event["frames"]]
        assert snapshot.stacks.of(int(trace.stack[index])) == frames
    assert len(snapshot.stacks.stacks) == 3, "interned"
    states = [b["state"] for s in want["segments"] for b in s["blocks"]]
    assert (snapshot.blocks[0].state == BlockState.PENDING_FREE).sum() == states.count("active_pending_free") == 1
    assert snapshot.segments[0].total.tolist() == [s["total_size"] for s in want["segments"]]


@pytest.mark.parametrize("form", ["pickle-2", "pickle-3", "pickle-5", "gzip", "json", "json.gz"])
def test_containers(raw: dict[str, Any], tmp_path: Path, form: str) -> None:
    file = tmp_path / "snapshot"
    if form.startswith("pickle"):
        file.write_bytes(pickle.dumps(raw, protocol=int(form[-1])))
    else:
        data = json.dumps(raw).encode() if "json" in form else pickle.dumps(raw, protocol=4)
        file.write_bytes(gzip.compress(data) if "gz" in form else data)
    snapshot = load_snapshot(file)
    assert len(snapshot.stacks.stacks) == 3
    timeline = build_timeline(snapshot)
    assert (timeline.max_requested, int(timeline.active[-1])) == peaks(raw)


def test_torch_2_0(raw: dict[str, Any]) -> None:
    """Blocks without addresses, their stacks and sizes in a history, no settings, no times."""
    want = peaks(pickle.loads(pickle.dumps(raw)))
    for segment in raw["segments"]:
        del segment["segment_pool_id"], segment["is_expandable"], segment["frames"]
        for block in segment["blocks"]:
            del block["address"], block["frames"]
            if block["state"] != "inactive":
                frames = [{"filename": "a.py", "line": 1, "name": "f"}]
                block["history"] = [{"addr": 1, "real_size": block.pop("requested_size"), "frames": frames}]
    for event in raw["device_traces"][0]:
        del event["time_us"], event["pool_id"]
    snapshot = snapshot_from_raw({"segments": raw["segments"], "device_traces": raw["device_traces"]})
    assert snapshot.torch == "2.0"
    assert not snapshot.traces[0].has_times
    timeline = build_timeline(snapshot)
    assert (timeline.max_requested, int(timeline.active[-1])) == want
    in_use = snapshot.blocks[0].state != BlockState.INACTIVE
    assert {snapshot.stacks.of(s)[0].function for s in snapshot.blocks[0].stack[in_use]} == {"f"}


def test_a_bare_list_of_segments(raw: dict[str, Any]) -> None:
    final = build_timeline(snapshot_from_raw(pickle.loads(pickle.dumps(raw))))
    assert peaks(raw["segments"]) == (int(final.requested_total[-1]), int(final.active[-1]))


def test_state_only_and_other_devices(raw: dict[str, Any]) -> None:
    for segment in raw["segments"]:
        segment["device"] = 3
    traces = raw["device_traces"][0]
    snapshot = snapshot_from_raw({**raw, "device_traces": [[], [], [], traces]})
    assert snapshot.devices == [3]
    assert build_timeline(snapshot).device == 3


def test_missing_fields_and_unknown_actions(raw: dict[str, Any]) -> None:
    """The tracer of tomorrow adds actions; somebody's old one left fields out."""
    want = peaks(pickle.loads(pickle.dumps(raw)))
    trace = raw["device_traces"][0]
    trace.insert(1, {"action": "nap", "name": "step 1"})
    trace.insert(2, {"action": "nap", "addr": None, "frames": None})
    trace.append({"action": "oom", "size": 10, "device_free": 77, "stream": 0, "time_us": 1})
    for event in trace[:-1:3]:
        event.pop("frames", None)
        event.pop("time_us", None)
    snapshot = snapshot_from_raw(raw)
    assert "2 events of unknown actions were skipped: nap (2)" in snapshot.notes[0]
    timeline = build_timeline(snapshot)
    assert (timeline.max_requested, int(timeline.active[-1])) == want
    assert timeline.oom_events.tolist() == [len(trace) - 1] if trace else True
    assert snapshot.traces[0].address[-1] == 77
    assert snapshot.traces[0].time_us[:5].tolist() == [20] * 5, "the first one known"
    assert np.all(np.diff(timeline.event_us) >= 0)


def test_old_names_of_states(raw: dict[str, Any]) -> None:
    for segment in raw["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_pending_free":
                block["state"] = "active_awaiting_free"
    snapshot = snapshot_from_raw(raw)
    assert (snapshot.blocks[0].state == BlockState.PENDING_FREE).sum() == 1
    timeline = build_timeline(snapshot)
    assert timeline.active[-1] > timeline.allocated[-1]


@pytest.mark.parametrize(
    ("keys", "event_keys", "version"),
    [
        ([], [], "2.1"),
        ([], ["time_us"], "2.2"),
        (["allocator_settings"], ["time_us"], "2.3-2.4"),
        (["allocator_settings", "external_annotations"], ["time_us"], "2.5-2.7"),
        (["allocator_settings", "external_annotations"], ["compile_context"], "2.8-2.9"),
        (["allocator_settings"], ["compile_context", "user_metadata"], ">=2.10"),
    ],
)
def test_version_by_its_keys(raw: dict[str, Any], keys: list[str], event_keys: list[str], version: str) -> None:
    for event in raw["device_traces"][0]:
        del event["time_us"]
        event |= dict.fromkeys(event_keys, "")  # the value does not matter
        event.update(time_us=5) if "time_us" in event_keys else None
    chosen = {"segments": raw["segments"], "device_traces": raw["device_traces"], **dict.fromkeys(keys)}
    assert snapshot_from_raw(chosen).torch == version
    assert snapshot_from_raw({**raw, "memprof": {"versions": {"torch": "2.13.0"}}}).torch == "2.13.0"


@pytest.mark.parametrize(
    ("key", "given", "kept", "note"),
    [
        ("versions", {"torch": "2.13", "trl": 1}, {"torch": "2.13"}, "1 entry of 'versions' is"),
        (
            "host",
            {"rss_bytes": 5, "pinned_bytes": -1, "offloaded": {"weights": 3, "x": 1}},
            HostMemory(rss_bytes=5, offloaded={Category.WEIGHTS: 3}),
            "'host.pinned_bytes' is",
        ),
        (
            "recorded",
            {"dropped_events": -1, "thinned": [[1, 2, 3], [4]]},
            RecordedHistory(thinned=(Interval(1, 2),)),
            "'recorded.dropped_events' is",
        ),
        ("oom", {"requested_bytes": -1}, None, "'oom' has no usable 'requested_bytes'"),
        ("oom", {"phase": "forward"}, None, "'oom' has no usable 'requested_bytes'"),
        (
            "oom",
            {"requested_bytes": 1, "phase": "x", "reserved_bytes": "y"},
            FailedAllocation(requested_bytes=1),
            "'oom.phase' is",
        ),
        (
            "switches",
            [[1, "sleep", 1, 2, 3, 0, None], [1, "nap", 1, 2, 3, 0, None]],
            (EngineSwitch(1, "sleep", 1, 2, 3, 0, None),),
            "1 entry of 'switches' is",
        ),
        ("outside", {"allocators": 3, "reason": "x"}, OutsideTorch(reason="x"), "'outside.allocators' is"),
        ("steps", [[1, 2, 3, 4], [2**40, 2, 3, 4]], (StepMark(1, 2, 3, 4),), "1 entry of 'steps' is"),
        ("holders", [[1, 2, "a", "b"], [1, 2, 3], 4], (Holder(1, 2, ("a", "b")),), "2 entries of 'holders' are"),
        ("non_torch_bytes", -1, None, "'non_torch_bytes' is"),
        ("rank", -1, 0, "'rank' is"),
        ("world_size", True, 1, "'world_size' is"),
        ("kind", "magic", Kind.CUDA, "'kind' is"),
        ("config", [1], None, "'config' is"),
        ("config", {"a": 2**63, "b": 1}, {"a": None, "b": 1}, ""),
        ("setup", object(), None, "'setup' is not plain data"),
    ],
)  # fmt: skip
def test_what_is_not_documented_is_left_out_with_a_note(
    raw: dict[str, Any], key: str, given: Any, kept: Any, note: str
) -> None:
    snapshot = snapshot_from_raw({**raw, "memprof": {key: given}})
    assert getattr(snapshot.run, key) == kept
    assert bool(note) == any(text.startswith(f"memprof key: {note}") for text in snapshot.notes)


def test_the_memprof_key(raw: dict[str, Any]) -> None:
    phases = [{"phase": "forward", "start_us": 1, "detail": "x\x1b[31m"}]
    snapshot = snapshot_from_raw({**raw, "memprof": {"kind": "trace", "rank": 1, "phases": phases, "of_1": 5, 7: 1}})
    assert snapshot.kind is Kind.TRACE
    mark = PhaseMark(phase=Phase.FORWARD, start_us=1, detail="x\ufffd[31m")
    assert snapshot.run == RecordedRun(kind=Kind.TRACE, rank=1, phases=(mark,))
    assert snapshot.notes == ["memprof key: a name in it is not text, ignored"]
    assert snapshot_from_raw({**raw, "memprof": 5}).run == RecordedRun()


def test_entries_of_the_memprof_key(raw: dict[str, Any]) -> None:
    """Whoever reads the key later can rely on documented types: bad entries are dropped and counted."""
    phase = {"phase": "forward", "start_us": 5, "end_us": None, "future": [1]}
    key = {
        "phases": [phase, {"phase": "forward"}, {"phase": 3, "start_us": 5}, 7, {**phase, "step": "x"}],
        "steps": [[1, 2, 3], [1, 2, 3, 4096], [1, 2], [1, 2, None], "abc"],
        "owners": [[1, 2, "weights"], [1, 2, "weights", None, "w"], [1.5, 2, "weights"], [1, 2, "weights", 3]],
        "samples": [[1, 2, None, None], [None, 2]],
        "recorded": {"history": "sometimes", "start_us": 1, "max_entries": True},
        "versions": {"torch": 3, "trl": "1.16"},
        "notes": ["a", 1],
        "buckets": [512, -1, 2**63 - 1],
    }
    snapshot = snapshot_from_raw({**raw, "memprof": key})
    assert snapshot.run == RecordedRun(
        phases=(PhaseMark(phase=Phase.FORWARD, start_us=5),),
        steps=(StepMark(1, 2, 3), StepMark(1, 2, 3, 4096)),
        owners=(Owner(1, 2, Category.WEIGHTS), Owner(1, 2, Category.WEIGHTS, None, "w")),
        samples=(MemorySample(1, 2),),
        recorded=RecordedHistory(start_us=1),
        versions={"trl": "1.16"},
        notes=("a",),
        buckets=(512,),
    )
    assert len(snapshot.notes) == len(key) + 1
    assert snapshot.notes[:2] == [
        "memprof key: 1 entry of 'versions' is not as documented, ignored",
        "memprof key: 'recorded.history' is not as documented (invalid enum value 'sometimes'), ignored",
    ]
    assert "memprof key: 4 entries of 'phases' are not as documented, ignored" in snapshot.notes


def test_annotations_and_settings_are_read_as_documented(raw: dict[str, Any]) -> None:
    good = {"name": "Optimizer.step#Adam.step", "stage": "START", "device": 0, "time_us": 5}
    bad = [{**good, "time_us": time} for time in ([1], "1", None, 2**63, 1.5)]
    settings = {"expandable_segments": True, "roundup_power2_divisions": {"1": 0}, "future": [1], "other": {"a": "b"}}
    snapshot = snapshot_from_raw(
        {**raw, "external_annotations": [good, *bad, 7, {**good, "future": 1}], "allocator_settings": settings}
    )
    annotation = Annotation(name="Optimizer.step#Adam.step", stage="START", device=0, time_us=5)
    assert snapshot.annotations == [annotation, annotation]
    assert snapshot.settings == {"expandable_segments": True, "roundup_power2_divisions": {"1": 0}}
    assert snapshot.notes == [
        "2 entries of 'allocator_settings' are not as documented, ignored",
        "6 entries of 'external_annotations' are not as documented, ignored",
    ]
    broken = snapshot_from_raw({**raw, "external_annotations": 7, "allocator_settings": [1]})
    assert (broken.annotations, broken.settings, len(broken.notes)) == ([], {}, 2)


def test_unsigned_addresses_are_those_of_some_devices(raw: dict[str, Any], tmp_path: Path) -> None:
    """The same recording at addresses and streams of 2^63 and more has the same answer, and its owners apply."""
    trace = raw["device_traces"][0]
    addresses = {event["addr"] for event in trace if event["action"] == "alloc"}
    low, high = (pickle.loads(pickle.dumps(raw)) for _ in range(2))
    raised(high)
    allocations = []
    for name, by, snapshot in (("low", 0, low), ("high", 1 << 63, high)):
        time = trace[-1]["time_us"]
        owners = [[address + by, time, "weights", None, "w"] for address in sorted(addresses)]
        holders = [[address + by, time, "x"] for address in sorted(addresses)]
        key = {"owners": owners, "holders": holders}
        file = save_snapshot({**snapshot, "memprof": key}, tmp_path / f"{name}.pickle")
        analysis = analyze(file)
        assert not analysis.snapshot.notes
        found = analysis.explain()
        owned = [row for row in found if row.evidence == "owner"]
        assert len(owned) > 1
        assert all(row.held_by == ("x",) for row in owned)
        assert [analysis.explain(address=row.address + 1) for row in found] == [(row,) for row in found]
        allocations.append([replace(row, address=row.address - by) for row in found])
    assert allocations[0] == allocations[1]


def test_names_cannot_carry_escapes(raw: dict[str, Any]) -> None:
    raw["device_traces"][0][0]["frames"] = [{"filename": "a\x1b]0;x\x07\ud800.py", "line": 1, "name": "<b>\u202e"}]
    snapshot = snapshot_from_raw(raw)
    frame = snapshot.stacks.of(int(snapshot.traces[0].stack[0]))[0]
    assert frame.file.isprintable()
    assert frame.function.isprintable()
    json.dumps(frame).encode()
    frame.file.encode("utf-8")


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"model": 1},
        7,
        "text",
        {"segments": {}, "device_traces": []},
        {"segments": [3]},
        {"segments": [{"address": "x"}]},
        {"segments": [{"address": 1, "total_size": 1, "stream": 0, "device": -1}]},
        {"segments": [{"address": 1, "total_size": 1, "stream": 0, "blocks": 5}]},
        {"segments": [{"address": 1, "total_size": 1, "stream": 0, "blocks": [{}]}]},
        {"device_traces": [7]},
        {"device_traces": [[7]]},
        {"device_traces": [[{"action": "alloc", "addr": "x", "size": 1, "stream": 0}]]},
        {"device_traces": [[{"action": "alloc", "addr": 1, "size": -1, "stream": 0}]]},
        {"device_traces": [[{"action": "alloc", "addr": -2, "size": 1, "stream": 0}]]},
        {"device_traces": [[{"action": "alloc", "addr": 1, "size": 1, "stream": 1 << 64}]]},
        {"segments": [{"address": 1 << 64, "total_size": 1, "stream": 0}]},
        {"device_traces": [[{"action": "alloc", "addr": 1 << 64, "size": 1, "stream": 0}]]},
        {"device_traces": [[{"action": "alloc", "addr": 1, "size": 1 << 60, "stream": 0}]]},
    ],
)
def test_other_shapes_are_refused_in_a_sentence(shape: Any, tmp_path: Path) -> None:
    file = tmp_path / "other.pickle"
    file.write_bytes(pickle.dumps(shape, protocol=4))
    with pytest.raises(InputError) as caught:
        load_snapshot(file)
    message = str(caught.value)
    assert message.startswith(str(file))
    assert "not a memory snapshot" in message
    assert "\n" not in message


def test_saving_is_all_or_nothing(raw: dict[str, Any], tmp_path: Path) -> None:
    file = save_snapshot(raw, tmp_path / "s.pickle")
    before = file.read_bytes()
    assert before[:2] == b"\x80\x04"
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        save_snapshot({"segments": [], "device_traces": [lambda: 0]}, file)
    assert file.read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["s.pickle"]
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        save_snapshot(raw, blocked / "s.pickle")


# What PyTorch's own viewer (MemoryViz.js) understands; anything else and it shows nothing.
VIEWER = {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "NONE",
    "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE",
    "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "LIST", "DICT", "APPEND",
    "APPENDS", "SETITEM", "SETITEMS",
}  # fmt: skip


def test_torchs_viewer_opens_what_is_saved(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["memprof"] = {"notes": ["x" * 300, "\u00e9"], "created": None, "config": {"lr": 1e-6, "a": [True, False, -1]}}
    raw["memprof"]["samples"] = [[1763000000515952, 1 << 40, None, -5]] * 2000
    file = save_snapshot(raw, tmp_path / "s.pickle")
    opcodes = list(pickletools.genops(file.read_bytes()))
    assert {code.name for code, _, _ in opcodes} <= VIEWER
    assert all(-(1 << 63) <= value < 1 << 63 for code, value, _ in opcodes if code.name == "LONG1")
    assert [value for code, value, _ in opcodes if code.name == "PROTO"] == [4]


def test_what_torchs_cpp_writer_makes(raw: dict[str, Any]) -> None:
    """libtorch pickles snapshots itself: protocol 2, every number of 8 bytes, pools as tuples by mark."""

    def write(value: Any) -> bytes:
        if isinstance(value, dict):
            return b"}(" + b"".join(write(k) + write(v) for k, v in value.items()) + b"u"
        if isinstance(value, list):
            return b"](" + b"".join(map(write, value)) + b"e"
        if isinstance(value, tuple):
            return b"(" + b"".join(b"K" + bytes([v]) for v in value) + b"t"
        if isinstance(value, bool):
            return b"\x88" if value else b"\x89"
        if isinstance(value, int):
            return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)
        text = str(value).encode()
        return b"X" + len(text).to_bytes(4, "little") + text + b"q\x00"

    snapshot = snapshot_from_raw(plain_from_bytes(b"\x80\x02" + write(raw) + b".", "x"))
    timeline = build_timeline(snapshot)
    assert (timeline.max_requested, int(timeline.active[-1])) == peaks(raw)
    assert len(snapshot.pools) == 2
