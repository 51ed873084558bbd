"""The CUDA recorder's logic, against an allocator that behaves like CUDA's at the calls memprof makes.

What is replaced is only the outermost seam (:class:`memprof.recording.cuda.backend.TorchCuda`); that the real torch
answers those calls in this way needs a GPU to see.
"""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from memprof.analysis.analysis import analyze
from memprof.recording.cuda import backend
from memprof.recording.cuda import history as module
from memprof.recording.cuda.backend import TorchCuda
from memprof.recording.cuda.history import CudaHistory
from memprof.recording.cuda.ring import AllocationCount
from memprof.recording.phases import phase
from memprof.recording.recorder import AllocationTags, DeviceInfo, Recorder
from memprof.recording.session import Session
from memprof.recording.trace.tensor_trace import TensorTrace
from memprof.snapshot import load_snapshot, snapshot_from_raw
from memprof.timeline.timeline import build_timeline
from tests.recording.fake_cuda import Allocator, started_session


@pytest.fixture(autouse=True)
def a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaHistory, "other_device", lambda self, i: DeviceInfo(i, "cuda", "Pretend", 24 * 10**9))


def started(allocator: Allocator, **options: Any) -> CudaHistory:
    recorder = CudaHistory(torch.device("cuda", allocator.index), backend=allocator, **options)
    recorder.start()
    return recorder


def report_of(session: Session, path: Path) -> dict[str, Any]:
    """Write what is recorded so far, and report it."""
    session.write(path)
    return analyze(path).to_dict()


def test_history_is_taken_before_it_is_stopped() -> None:
    allocator = Allocator()
    recorder = started(allocator)
    kept = allocator.malloc(1000)
    allocator.free(allocator.malloc(700))
    recorder.stop()
    assert allocator.recording is None
    raw, recorded = recorder.dump()
    assert [e["action"] for e in raw["device_traces"][0]] == ["alloc", "alloc", "free_requested", "free_completed"]
    assert [b["address"] for b in raw["segments"][0]["blocks"] if b["state"] == "active_allocated"] == [kept]
    assert (recorded.history, recorded.thinned) == ("complete", [])


def test_a_recorder_that_starts_again_stops_again() -> None:
    """It used to leave the history on, and to write what it had recorded first."""
    allocator = Allocator()
    recorder = started(allocator)
    allocator.free(allocator.malloc(512))
    recorder.stop()
    recorder.start()
    allocator.malloc(512)
    recorder.stop()
    raw, recorded = recorder.dump()
    assert [entry["action"] for entry in raw["device_traces"][0]] == ["alloc"]
    assert recorded.history == "complete"
    assert not allocator.history_enabled()


def test_what_was_allocated_before_makes_it_start_late() -> None:
    allocator = Allocator()
    allocator.malloc(5)
    recorder = started(allocator)
    assert recorder.dump()[1].history == "started_late"


def test_a_full_ring_is_truncated_and_starts_at_its_oldest_entry() -> None:
    allocator = Allocator()
    recorder = started(allocator, max_entries=9)
    for _ in range(10):
        allocator.free(allocator.malloc(100))
    raw, recorded = recorder.dump()
    assert recorded.history == "truncated"
    assert recorded.start_us == raw["device_traces"][0][0]["time_us"]


def test_a_users_own_history_is_read_and_left_alone() -> None:
    allocator = Allocator()
    allocator.record("state", "all", 50, [], False)
    allocator.malloc(640)
    allocator.calls.clear()
    recorder = started(allocator)
    recorder.set_tags(AllocationTags("generate", 1))
    for _ in range(40):
        recorder.on_token(1)
    recorder.stop()
    assert [c for c in allocator.calls if c != "reset"] == []
    assert allocator.recording == {"context": "state", "stacks": "all", "max_entries": 50, "skip": []}
    assert len(recorder.dump()[0]["device_traces"][0]) == 1
    assert "left as it was" in recorder.notes[0]


def test_tags_follow_phases_and_a_users_tag_is_respected() -> None:
    allocator = Allocator()
    recorder = started(allocator)
    recorder.set_tags(AllocationTags("optimizer_step", 3))
    assert allocator.text == "memprof:phase=optimizer_step;step=3;region=optimizer"
    recorder.stop()
    assert allocator.text == ""

    allocator = Allocator()
    allocator.text = "the user's"
    recorder = started(allocator)
    recorder.set_tags(AllocationTags("forward", 1))
    recorder.stop()
    assert allocator.text == "the user's"


def test_windows_have_their_own_peaks_by_resetting() -> None:
    allocator = Allocator()
    recorder = started(allocator)
    recorder.open_window()
    allocator.free(allocator.malloc(512 * 10))
    recorder.open_window()
    allocator.free(allocator.malloc(512 * 4))
    inner = recorder.close_window()
    recorder.open_window()
    allocator.malloc(512)
    second = recorder.close_window()
    outer = recorder.close_window()
    assert (inner.allocated_peak, second.allocated_peak, outer.allocated_peak) == (512 * 4, 512, 512 * 10)
    assert (second.allocated_end, second.reserved_end) == (512, 2**21)


@pytest.mark.parametrize("ends_first", ["outer", "inner"])
def test_recordings_that_overlap_have_the_same_peaks(ends_first: str) -> None:
    """The one that looked second at a boundary used to find counters that the other had reset."""
    allocator = Allocator()
    outer, inner = (Session(CudaHistory(torch.device("cuda", 0), backend=allocator)) for _ in range(2))
    outer.start()
    inner.start()
    with phase("forward", step=1):
        allocator.free(allocator.malloc(512 * 40))
        with phase("reward"):
            allocator.free(allocator.malloc(512 * 30))
    found = []
    for session in (outer, inner) if ends_first == "outer" else (inner, outer):
        session.stop()
        rows = session.to_raw()["memprof"]["counters"]
        found.append([(row["phase"], row["allocated_peak"]) for row in rows if row["phase"] != "other"])
    assert found[0] == found[1] == [("reward", 512 * 30), ("forward", 512 * 40)]
    assert "reset_peaks" not in vars(allocator), "the counters' reset is torch's own again"


@pytest.mark.parametrize(("resets", "peak"), [(True, 512 * 10), (False, None)])
def test_a_peak_counts_although_the_program_resets_the_counters(resets: bool, peak: int | None) -> None:
    """It used to be what was allocated after the reset: 4 blocks of 10, of which nothing was said."""
    allocator = Allocator()
    if not resets:
        allocator.free(allocator.malloc(512 * 10))
    recorder = started(allocator, reset_peaks=resets)
    recorder.open_window()
    allocator.free(allocator.malloc(512 * 10))
    allocator.reset_peaks(0)
    allocator.free(allocator.malloc(512 * 4))
    assert recorder.close_window().allocated_peak == peak
    recorder.stop()


def test_without_resetting_only_a_raised_peak_is_known() -> None:
    allocator = Allocator()
    recorder = started(allocator, reset_peaks=False)
    allocator.free(allocator.malloc(512 * 10))
    recorder.open_window()
    allocator.free(allocator.malloc(512 * 4))
    below = recorder.close_window()
    recorder.open_window()
    allocator.malloc(512 * 20)
    above = recorder.close_window()
    assert (below.allocated_peak, above.allocated_peak) == (None, 512 * 20)
    assert "reset" not in allocator.calls


def decode(allocator: Allocator, recorder: CudaHistory, tokens: int) -> list[int]:
    """A decode loop with a cache of one block that grows, and scratch; live bytes after each token."""
    recorder.set_tags(AllocationTags("generate", 1))
    recorder.on_token(16)
    cache = allocator.malloc(512 * 16)
    totals = []
    for token in range(tokens):
        recorder.on_token(1)
        for _ in range(20):
            allocator.free(allocator.malloc(300))
        longer = allocator.malloc(512 * (17 + token))
        allocator.free(cache)
        cache = longer
        totals.append(allocator.current)
    recorder.set_tags(AllocationTags("other", 1))
    allocator.free(cache)
    return totals


def test_steady_decoding_is_thinned_and_totals_stay_exact_outside_the_gaps(tmp_path: Path) -> None:
    full, thin = Allocator(), Allocator()
    untouched = decode(full, started(full, thin=False), 200)
    session = Session(recorder := started(thin))
    recorder._backend = thin
    assert decode(thin, recorder, 200) == untouched
    thin.malloc(512 * 3)
    raw, recorded = recorder.dump()
    assert len(thin.trace) < len(full.trace) / 4
    assert len(recorded.thinned) > 10
    assert all(a < b for a, b in recorded.thinned)

    session._started = False
    path = tmp_path / "thin.pickle"
    session.write(path)
    line = build_timeline(load_snapshot(path))
    assert line.active[0] == 0
    assert line.active[-1] == 512 * 3
    # The cache is nearly at its longest at the last recorded token.
    assert line.max_requested > 0.9 * max(untouched)
    assert raw["device_traces"][0] == sorted(raw["device_traces"][0], key=lambda e: e["time_us"])


def test_thinning_ends_with_generation_and_begins_anew() -> None:
    allocator = Allocator()
    recorder = started(allocator)
    decode(allocator, recorder, 30)
    assert allocator.recording is not None
    assert allocator.recording["skip"] == []
    recorder.set_tags(AllocationTags("forward", 1))
    for _ in range(50):
        recorder.on_token(1)
    assert allocator.recording["skip"] == []


def test_torch_without_the_means_is_not_thinned() -> None:
    allocator = Allocator()
    allocator.can_skip = False
    recorder = started(allocator)
    decode(allocator, recorder, 100)
    assert "thin" not in allocator.calls


def test_an_oom_is_told_with_sizes_and_stack() -> None:
    allocator = Allocator(index=1)
    recorder = started(allocator)
    told: list[int] = []
    recorder.on_oom = lambda: told.append(1)
    assert allocator.observer is not None
    allocator.observer(1, 2**30, 24 * 10**9, 7 * 2**20)
    found = recorder.oom()
    assert found is not None
    assert (found.requested_bytes, found.device_free_bytes) == (2**30, 7 * 2**20)
    assert (found.device, found.limit_bytes) == (1, None)
    assert any("test_cuda_history.py" in line for line in found.stack)
    assert told == [1]
    recorder.forget_oom()
    allocator.observer(0, 5, 6 * 10**9, 7)  # another device of the same process, with a limit of its own
    found = recorder.oom()
    assert found is not None
    assert (found.device, found.limit_bytes) == (0, 6 * 10**9)
    recorder.stop()
    recorder.forget_oom()
    allocator.observer(1, 5, 6, 7)
    assert recorder.oom() is None


class _Two(Allocator):
    """A process with two devices, which torch records together."""

    def __init__(self) -> None:
        super().__init__(0)
        self.second = Allocator(1)

    def record(self, *arguments: Any) -> None:
        super().record(*arguments)
        self.second.record(*arguments)

    def stop(self) -> None:
        super().stop()
        self.second.stop()

    def segments(self) -> list[dict[str, Any]]:
        return super().segments() + self.second.segments()

    def snapshot(self) -> dict[str, Any]:
        return {**super().snapshot(), "device_traces": copy.deepcopy([self.trace, self.second.trace])}

    def counts(self) -> dict[int, AllocationCount]:
        return super().counts() | self.second.counts()

    def stats(self, device: int) -> dict[str, Any]:
        return self.second.stats(device) if device else super().stats(device)


def test_each_device_has_a_history_of_its_own() -> None:
    """The second device's ring overflows, the first one's does not; and the other way about, with one in use before."""
    two = _Two()
    session = started_session(two, max_entries=200)
    two.malloc(2**20)
    for address in [two.second.malloc(2**20) for _ in range(500)]:
        two.second.free(address)
    two.second.malloc(2**20)
    session.stop()
    raw = session.to_raw()
    assert raw["memprof"]["recorded"]["history"] == "complete"
    snapshot = snapshot_from_raw(raw)
    assert [build_timeline(snapshot, d).history.value for d in (0, 1)] == ["complete", "truncated"]
    assert snapshot.device_facts(1).start_us == session.to_raw()["device_traces"][1][0]["time_us"]

    two = _Two()
    two.second.malloc(2**20)
    session = started_session(two, max_entries=200)
    for _ in range(300):
        two.free(two.malloc(512))
    two.second.malloc(512)
    session.stop()
    snapshot = snapshot_from_raw(session.to_raw())
    assert [build_timeline(snapshot, d).history.value for d in (0, 1)] == ["truncated", "started_late"]


def test_each_device_of_a_user_s_own_history_is_judged_by_its_own_count() -> None:
    """The second device's ring lost a loop whose blocks are all freed again: only torch's count shows that."""
    two = _Two()
    two.record("all", "python", 200, [], True)  # the user's own
    session = started_session(two)
    two.malloc(512)
    for _ in range(300):
        two.second.free(two.second.malloc(512))
    session.stop()
    snapshot = snapshot_from_raw(session.to_raw())
    assert [build_timeline(snapshot, d).history.value for d in (0, 1)] == ["complete", "truncated"]


@pytest.mark.parametrize("uses_second", [False, True])
def test_a_capacity_says_which_devices_it_does_not_limit(uses_second: bool) -> None:
    two = _Two()
    session = started_session(two, capacity=2**30)
    two.malloc(512)
    if uses_second:
        two.second.malloc(2**31)
    expected = ["capacity was applied to device 0 alone; the program has also used device 1"] if uses_second else []
    for _ in ("while it runs", "afterwards"):
        notes = session.to_raw()["memprof"]["notes"]
        assert [note for note in notes if "capacity" in note] == expected
        session.stop()


def test_phases_are_kept_from_where_any_device_s_history_begins() -> None:
    two = _Two()
    session = started_session(two, max_entries=200)
    mark = session.enter_phase("forward")
    assert mark is not None
    two.second.malloc(2**20)
    session.exit_phase(mark)
    for _ in range(300):
        two.free(two.malloc(512))
    session.stop()
    assert "forward" in [span["phase"] for span in session.to_raw()["memprof"]["phases"]]


def test_a_second_write_equals_the_first() -> None:
    """The gaps of a thinned history, once filled, made it longer than the ring, so a second write lost them."""
    allocator = Allocator()
    session = started_session(allocator, max_entries=3000)
    session.recorder.set_tags(AllocationTags("generate", 1))
    for _ in range(200):
        session.recorder.on_token(1)  # type: ignore[attr-defined]
        for _ in range(20):
            allocator.malloc(1024)
    session.recorder.set_tags(AllocationTags("other", 1))
    session.stop()
    first, second, changed = session.to_raw(), session.to_raw(), session.to_raw()
    assert first["memprof"]["recorded"]["thinned"]
    assert len(first["device_traces"][0]) > 3000 > len(allocator.trace)
    changed["device_traces"][0][0]["frames"].clear()
    changed["device_traces"][0].clear()
    changed["segments"][0]["blocks"].clear()
    assert first == second == session.to_raw()


def _destroy(value: Any) -> None:
    """Empty everything inside plain data."""
    for inner in list(value.values() if isinstance(value, dict) else value):
        if isinstance(inner, (dict, list)):
            _destroy(inner)
    value.clear()


def _comparable(raw: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a clock says of the write."""
    raw = copy.deepcopy(raw)
    for name in ("created", "overhead", "samples", "host"):
        del raw["memprof"][name]
    raw["memprof"]["recorded"].pop("stop_us")
    for name in ("phases", "steps", "counters", "holders", "owners"):
        raw["memprof"][name] = [list(getattr(row, "values", row.__iter__)()) for row in raw["memprof"][name]]
        for row in raw["memprof"][name]:
            row[:] = [value for value in row if not (isinstance(value, int) and value > 10**15)]
    return raw


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("kind", ["cuda", "trace"])
def test_what_is_written_is_a_copy(kind: str, is_running: bool) -> None:
    """Whoever has it may change it, and a later write changes no earlier one."""
    allocator = Allocator()
    recorder = CudaHistory(torch.device("cuda", 0), backend=allocator) if kind == "cuda" else None
    session = Session(recorder or TensorTrace(torch.device("cpu")), config={"lr": [0.1]})
    session.setup = {"model_config": {"layers": [1]}}
    model = torch.nn.Linear(300, 1000)
    session.add_model(model, "policy")
    session.start()
    session.set_step(1)
    session.add_batch(1, 2, 3)
    session.add_lengths([(1, 2)])
    mark = session.enter_phase("generate")
    assert mark is not None
    for _ in range(30):
        getattr(session.recorder, "on_token", lambda _: None)(1)
        allocator.malloc(512)
    session.exit_phase(mark)
    kept = [torch.ones(2**20)]
    if allocator.observer is not None:
        allocator.observer(0, 2**30, 24 * 10**9, 512)
    session.set_step(2)
    if not is_running:
        session.stop()
    first = session.to_raw()
    before = _comparable(first)
    assert first["memprof"]["counters"]
    assert bool(first["memprof"]["holders"]) == (kind == "trace" and len(kept) == 1)
    _destroy(first)
    second = session.to_raw()
    assert _comparable(second) == before
    held = copy.deepcopy(second)
    if is_running:
        allocator.malloc(512)
        torch.ones(100)
        session.set_step(3)
        session.stop()
    session.to_raw()
    assert second == held


def test_a_redacted_write_leaves_the_recording_as_it_was(tmp_path: Path) -> None:
    allocator = Allocator()
    session = started_session(allocator)
    allocator.malloc(512)
    session.stop()
    session._redact = True
    session.write(tmp_path / "redacted.pickle")
    session._redact = False
    plain = session.to_raw()
    assert plain["device_traces"][0][0]["frames"][0]["filename"] == "train.py"
    assert "redacted" not in plain["memprof"]
    assert plain["memprof"]["own_folders"]


def _users(entries: int, before: int = 0) -> tuple[Allocator, Session]:
    """A history that the user has switched on, with ``before`` blocks from before, and memprof's recording of it."""
    allocator = Allocator()
    allocator.record("all", "python", entries, [], True)
    for _ in range(before):
        allocator.malloc(512)
    return allocator, started_session(allocator)


def _history(session: Session) -> str:
    session.stop()
    return build_timeline(snapshot_from_raw(session.to_raw())).history.value


def test_a_users_own_history_is_judged_by_its_own_trace() -> None:
    allocator, session = _users(100)
    for address in [allocator.malloc(512) for _ in range(300)]:
        allocator.free(address)
    assert _history(session) == "truncated", "it frees what it did not make"

    allocator, session = _users(100)
    for _ in range(300):
        allocator.malloc(512)
    assert _history(session) == "truncated", "more is there at the end than it made"

    allocator, session = _users(100)
    for _ in range(300):
        allocator.free(allocator.malloc(512))
    assert _history(session) == "truncated", "everything has gone, and torch has counted more allocations"

    allocator, session = _users(1000)
    for _ in range(300):
        allocator.free(allocator.malloc(512))
    assert _history(session) == "complete"

    allocator, session = _users(1000, before=3)
    allocator.malloc(512)
    assert _history(session) == "started_late"

    allocator, session = _users(4, before=3)
    for address in list(allocator.live):
        allocator.free(address)
    assert _history(session) == "truncated", "of six events the last four"


@pytest.mark.parametrize("live", [0, 300])
def test_a_users_own_history_of_a_second_device_is_judged_by_that_device_s_trace(live: int) -> None:
    """What has been allocated was counted on the recorder's device only."""
    two = _Two()
    two.record("all", "python", 100, [], True)
    session = started_session(two)
    two.free(two.malloc(512))
    for _ in range(300):
        two.second.free(two.second.malloc(512))
    kept = [two.second.malloc(512) for _ in range(live)]
    session.stop()
    snapshot = snapshot_from_raw(session.to_raw())
    assert [build_timeline(snapshot, d).history.value for d in (0, 1)] == ["complete", "truncated"]
    assert len(kept) == live


def _program_clears(allocator: Allocator) -> None:
    allocator.record("all", "python", 1_000_000, [], True)


def _program_stops(allocator: Allocator) -> None:
    allocator.stop()


def _program_restarts(allocator: Allocator) -> None:
    allocator.stop()
    allocator.record("all", "all", 1_000_000, [], False)


def _program_shortens(allocator: Allocator) -> None:
    allocator.record("all", "all", 10, [], False)


_SWITCHES = (_program_clears, _program_stops, _program_restarts, _program_shortens)


@pytest.mark.parametrize("is_seen", [True, False])
@pytest.mark.parametrize("switch", _SWITCHES)
def test_a_history_that_the_program_switches_meanwhile_is_not_complete(switch: Any, is_seen: bool) -> None:
    """``is_seen``: torch's function has been called; else another way to its allocator."""
    two = _Two()
    record, stop = two.record, two.stop
    session = started_session(two)
    for device in (two, two.second):
        for _ in range(30):
            device.free(device.malloc(512))
    if not is_seen:
        vars(two).update(record=record, stop=stop)
    switch(two)
    for _ in range(9):
        two.free(two.malloc(512))
        two.second.malloc(1024)
    as_switched = None if two.recording is None else dict(two.recording)
    live = session.to_raw()
    session.stop()
    raw = session.to_raw()
    for one in (live, raw):
        snapshot = snapshot_from_raw(one)
        assert [build_timeline(snapshot, d).history.value for d in (0, 1)] == ["truncated", "truncated"]
        wanted = "the history has been the program's since then" if is_seen else "lost events although it was not full"
        assert len([note for note in one["memprof"]["notes"] if wanted in note]) == 1
        for device, trace in enumerate(one["device_traces"]):
            times = [entry["time_us"] for entry in trace]
            assert times == sorted(times)
            assert snapshot.device_facts(device).start_us in (None, *times, one["memprof"]["recorded"]["stop_us"])
    if is_seen:
        assert two.recording == as_switched


def test_what_the_program_records_meanwhile_is_left_to_it() -> None:
    """It switches the history on and loses nothing by it: memprof's recording is complete, and does not stop it."""
    allocator = Allocator()
    session = started_session(allocator)
    allocator.malloc(512)
    allocator.record("all", "all", 5000, [], False)
    assert allocator.recording is not None
    session.recorder.set_tags(AllocationTags("generate", 1))
    for _ in range(100):
        session.recorder.on_token(1)  # type: ignore[attr-defined]
    allocator.malloc(512)
    assert _history(session) == "complete"
    assert allocator.recording == {"context": "all", "stacks": "all", "max_entries": 5000, "skip": []}
    assert len(allocator.trace) == 2
    assert session.to_raw()["memprof"]["recorded"]["max_entries"] is None


def test_a_ring_that_the_program_enlarges_is_put_in_order() -> None:
    allocator = Allocator()
    allocator.record("all", "python", 100, [], True)
    for _ in range(50):
        allocator.free(allocator.malloc(512))
    session = started_session(allocator)
    allocator.free(allocator.malloc(512))
    allocator.record("all", "python", 1000, [], False)
    blocks = [allocator.malloc(512) for _ in range(20)]
    assert [e["time_us"] for e in allocator.trace] != sorted(e["time_us"] for e in allocator.trace)
    assert _history(session) == "complete"
    trace = session.to_raw()["device_traces"][0]
    assert [e["addr"] for e in trace[-20:]] == blocks


def test_a_shortened_ring_keeps_its_newest_events() -> None:
    allocator = Allocator()
    session = started_session(allocator)
    first = [allocator.malloc(512) for _ in range(40)]
    allocator.record("all", "python", 10, [], False)
    second = [allocator.malloc(512) for _ in range(25)]
    session.stop()
    trace = session.to_raw()["device_traces"][0]
    # Of the ring's first ten places five have been overwritten twice; events 11 to 40 of before still lie behind them.
    assert [e["addr"] for e in trace] == second[-5:]
    assert {e["addr"] for e in trace}.isdisjoint(first)


def test_counts_that_the_program_resets_are_not_believed() -> None:
    allocator, session = _users(100)
    kept = allocator.malloc(512)
    for _ in range(300):
        allocator.free(allocator.malloc(512))
    allocator.reset_counts()
    for _ in range(60):
        allocator.free(allocator.malloc(512))
    assert _history(session) == "truncated"
    assert kept in allocator.live


def test_a_failed_last_look_leaves_nothing_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Fractions()
    allocator = _Limited(cuda)
    recorder = started(allocator, capacity=6 * 10**9)
    recorder.set_tags(AllocationTags("forward", 1))

    def full() -> None:
        raise MemoryError

    monkeypatch.setattr(allocator, "snapshot", full)
    with pytest.raises(MemoryError):
        recorder.stop()
    assert (allocator.recording, allocator.text, cuda.value) == (None, "", 0.5)
    assert "record" not in vars(allocator)


class _Fractions:
    """The functions of ``torch.cuda`` that limit a process, and a device of 24 GB."""

    def __init__(self) -> None:
        self.value = 0.5

    def get_per_process_memory_fraction(self, device: int) -> float:
        return self.value

    def set_per_process_memory_fraction(self, fraction: float, device: int) -> None:
        self.value = fraction

    def get_device_properties(self, device: int) -> Any:
        return type("Properties", (), {"total_memory": 24 * 10**9})


class _Limited(Allocator):
    limit, total_bytes = TorchCuda.limit, TorchCuda.total_bytes  # type: ignore[assignment]

    def __init__(self, cuda: object) -> None:
        super().__init__()
        self._torch = type("Torch", (), {"cuda": cuda})


def test_a_users_memory_fraction_is_restored() -> None:
    cuda = _Fractions()
    recorder = started(_Limited(cuda), capacity=6 * 10**9)
    assert cuda.value == 0.25
    recorder.stop()
    assert cuda.value == 0.5
    recorder = started(_Limited(cuda), capacity=18 * 10**9)
    assert cuda.value == 0.5, "the user's limit is lower"
    recorder.stop()
    recorder = started(_Limited(cuda), capacity=6 * 10**9)
    cuda.value = 0.3  # by the program, meanwhile
    recorder.stop()
    assert cuda.value == 0.3


def test_limits_of_recordings_that_overlap_are_all_undone() -> None:
    """The first to end used to be passed over, and the second put back what the first had set."""
    cuda = _Fractions()
    first, second = (started(_Limited(cuda), capacity=size * 10**9) for size in (6, 3))
    first.stop()
    assert cuda.value == 0.125, "the second goes on"
    second.stop()
    assert cuda.value == 0.5


def test_no_limit_is_set_that_could_not_be_restored() -> None:
    class Older(_Fractions):
        get_per_process_memory_fraction = None  # type: ignore[assignment]

    cuda = Older()
    recorder = started(_Limited(cuda), capacity=6 * 10**9)
    assert cuda.value == 0.5
    assert any("capacity was not applied" in note for note in recorder.notes)
    recorder.stop()
    assert cuda.value == 0.5


def test_a_tag_that_the_program_sets_meanwhile_stays() -> None:
    allocator = Allocator()
    recorder = started(allocator)
    recorder.set_tags(AllocationTags("forward", 1))
    allocator.text = "the user's"
    recorder.set_tags(AllocationTags("backward", 1))
    recorder.stop()
    assert allocator.text == "the user's"


class _TagsByThread(Allocator):
    """As torch keeps tags."""

    def __init__(self) -> None:
        super().__init__()
        self.tags = threading.local()

    def tag(self, text: str) -> None:
        self.tags.text = text

    def current_tag(self) -> str:
        return str(getattr(self.tags, "text", ""))


def test_a_thread_s_tag_ends_with_its_phase() -> None:
    """It used to be the phase of another thread, until the thread's next one, and for ever after the recording."""
    allocator, tags = _TagsByThread(), {}
    session = Session(CudaHistory(torch.device("cuda", 0), backend=allocator))
    session.start()
    at = threading.Barrier(2, timeout=60)

    def work() -> None:
        with phase("reward", step=1):
            tags["inside"] = allocator.current_tag()
        tags["after"] = allocator.current_tag()
        with phase("reward", step=1):
            at.wait()  # the recording ends
            at.wait()
        tags["after the recording"] = allocator.current_tag()

    worker = threading.Thread(target=work)
    with phase("optimizer_step", step=1):
        worker.start()
        at.wait()
    tags["main"] = allocator.current_tag()
    session.stop()
    at.wait()
    worker.join()
    assert tags == {"inside": "memprof:phase=reward;step=1", "after": "", "main": "", "after the recording": ""}


def test_torch_is_given_one_observer_however_often_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    attached: list[Any] = []

    class Attach:
        @staticmethod
        def find() -> Any:
            return attached.append

    monkeypatch.setattr(backend.names, "OOM_OBSERVER", Attach)
    monkeypatch.setattr(backend, "_observers", set())
    monkeypatch.setattr(TorchCuda, "__init__", lambda self: None)
    for _ in range(3):
        TorchCuda().watch_oom(module._tell_oom)
    assert attached == [module._tell_oom]


def test_an_error_that_was_caught_is_not_why_a_later_step_ends(tmp_path: Path) -> None:
    allocator = Allocator()
    session = Session(CudaHistory(torch.device("cuda", 0), backend=allocator))
    session.start()
    session.set_step(3)
    mark = session.enter_phase("forward")
    assert mark is not None
    assert allocator.observer is not None
    allocator.insert({"action": "oom", "device_free": 512, "size": 2**30, "stream": 0,
                            "time_us": session.recorder.now_us(), "frames": []})  # fmt: skip
    allocator.observer(0, 2**30, 24 * 10**9, 512)
    at_once = report_of(session, tmp_path / "3.pickle")
    assert at_once["oom"]["requested_bytes"] == 2**30
    session.exit_phase(mark)
    session.write(tmp_path / "unwound.pickle")
    oom = load_snapshot(tmp_path / "unwound.pickle").run.oom
    assert oom is not None
    assert oom.phase == "forward"
    for step in range(4, 10):
        session.set_step(step)
        allocator.free(allocator.malloc(512))
    later = report_of(session, tmp_path / "9.pickle")
    session.stop()
    assert later["oom"] is None
    assert [n for n in later["notes"] if "1.00 GiB" in n and "forward of step 3" in n and "went on" in n]


def test_blocks_that_wait_for_a_stream_across_a_gap_contradict_nothing(tmp_path: Path) -> None:
    allocator = Allocator()
    session = Session(recorder := CudaHistory(torch.device("cuda", 0), backend=allocator))
    session.start()
    recorder.set_tags(AllocationTags("generate", 1))
    before, across, inside, late = (allocator.malloc(512 * n) for n in (1, 2, 3, 4))
    allocator.free(before, pending=True)
    allocator.free(late, pending=True)
    recorder._suspend()
    allocator.complete(before)
    allocator.free(across, pending=True)
    allocator.free(inside)
    made = allocator.malloc(512 * 8)
    allocator.free(made, pending=True)
    kept = allocator.malloc(512 * 16)
    recorder._resume()
    again = allocator.malloc(512 * 32)
    for address in (across, late, made):
        allocator.complete(address)
    session.stop()
    session.write(tmp_path / "s.pickle")
    line = build_timeline(load_snapshot(tmp_path / "s.pickle"))
    assert [n for n in line.notes if "contradict" in n or "although" in n or "missing from" in n] == []
    # In the order of the trace: four allocs, two requests, the gap's events, one alloc, three completed frees.
    assert line.active[4] == 512 * 10
    assert line.active[-1] == line.allocated[-1] == 512 * 48
    resumed = int(line.alloc_event[line.address == again][0])
    assert line.active[resumed] == 512 * (2 + 4 + 8 + 16)
    assert line.allocated[resumed] == 512 * 16
    assert {int(a) for a in line.address[line.alive_at(line.n_events)]} == {kept, again}


def test_a_session_on_it_writes_what_the_reader_understands(tmp_path: Path) -> None:
    allocator = Allocator()
    recorder: Recorder = CudaHistory(torch.device("cuda", 0), backend=allocator)
    session = Session(recorder)
    session.start()
    session.set_step(1)
    mark = session.enter_phase("forward")
    assert mark is not None
    allocator.free(allocator.malloc(512 * 100))
    session.exit_phase(mark)
    assert session.peak_of_step() == 512 * 100
    session.stop()
    session.write(tmp_path / "s.pickle")
    snapshot = load_snapshot(tmp_path / "s.pickle")
    assert snapshot.kind.value == "cuda"
    counter, before, between = snapshot.run.counters
    assert (before.phase, before.step, before.allocated_peak) == ("other", None, 0)
    assert (between.phase, between.step, between.allocated_peak) == ("other", 1, 0)
    assert (counter.phase, counter.step, counter.allocated_peak) == ("forward", 1, 512 * 100)
    assert build_timeline(snapshot).max_requested == 512 * 100
    assert any("phase=forward;step=1" in text for text in snapshot.metadata)


def test_the_real_backends_calls_exist_in_this_torch() -> None:
    backend = TorchCuda()
    assert {"context", "stacks", "max_entries", "clear_history", "skip_actions"} <= backend._accepted
    assert backend.can_skip
    assert backend.can_tag
    assert hasattr(torch.cuda, "memory_stats_as_nested_dict")
    assert not torch.cuda.is_available() or backend.history_enabled() in (True, False)
    assert module.DEFAULT_ENTRIES == 1_000_000
