"""Recordings that overlap share torch's history, and what a program leaves out of it is named."""

from __future__ import annotations

import pytest

from memprof.recording.cuda.history import CudaHistory
from memprof.recording.recorder import AllocationTags, DeviceInfo
from memprof.recording.session import Session
from memprof.snapshot import snapshot_from_raw
from memprof.timeline.timeline import Timeline, build_timeline
from tests.recording.fake_cuda import Allocator, started_session


@pytest.fixture(autouse=True)
def _a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaHistory, "other_device", lambda self, i: DeviceInfo(i, "cuda", "x", 24 * 10**9))


def work(allocator: Allocator, count: int = 20) -> None:
    for _ in range(count):
        allocator.free(allocator.malloc(512))


def line_of(session: Session) -> Timeline:
    return build_timeline(snapshot_from_raw(session.to_raw()))


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0)])
def test_two_recordings_lose_nothing_whichever_ends_first(first: int, second: int) -> None:
    """The first to end used to clear the history, and the other was truncated without a word."""
    allocator = Allocator()
    sessions = [started_session(allocator, max_entries=500)]
    allocator.malloc(1024)
    sessions.append(started_session(allocator, max_entries=7))
    work(allocator)
    sessions[first].stop()
    assert allocator.recording is not None, "the other one needs it"
    work(allocator)
    sessions[second].stop()
    assert allocator.recording is None
    assert "record" not in vars(allocator), "nothing is wrapped any more"
    assert [line_of(one).history.value for one in sessions] == ["complete", "started_late"]
    for one in sessions:
        recorded_part = one.to_raw()["memprof"]
        assert recorded_part["recorded"]["max_entries"] == 500
        assert len([note for note in recorded_part["notes"] if "share torch's memory history" in note]) == 1
    assert [call for call in allocator.calls if call != "reset"] == ["clear", "stop"]


def test_a_shared_history_is_not_thinned() -> None:
    allocator = Allocator()
    thinning, other = started_session(allocator), started_session(allocator)
    thinning.recorder.set_tags(AllocationTags("generate", 1))
    for _ in range(100):
        assert thinning.recorder.on_token(1)  # type: ignore[attr-defined]
        work(allocator, 1)
    thinning.stop()
    other.stop()
    assert line_of(other).history.value == "complete"
    assert sum(entry["action"] == "alloc" for entry in other.to_raw()["device_traces"][0]) == 100


def test_a_recording_that_joins_an_overflowed_history_has_lost_nothing_of_its_own() -> None:
    allocator = Allocator()
    first = started_session(allocator, max_entries=100)
    work(allocator, 200)
    second = started_session(allocator)
    work(allocator, 20)
    second.stop()
    first.stop()
    assert [line_of(one).history.value for one in (first, second)] == ["truncated", "complete"]


@pytest.mark.parametrize("skipped", [["alloc", "free_requested", "free_completed"], ["alloc"], ["free_completed"]])
@pytest.mark.parametrize("is_users", [False, True])
@pytest.mark.parametrize("is_taken_back", [True, False])
def test_what_the_program_leaves_out_is_a_gap(skipped: list[str], is_users: bool, is_taken_back: bool) -> None:
    """The range that a recording reports used to contain the hole."""
    allocator = Allocator()
    if is_users:
        allocator.record("all", "python", 10_000, [], True)
    session = started_session(allocator)
    kept = [allocator.malloc(1024) for _ in range(3)]
    allocator.record("all", "python", 10_000, skipped, False)
    session.recorder.set_tags(AllocationTags("forward", 1))  # ends gaps of memprof's own only
    work(allocator)
    allocator.free(kept.pop())
    kept.append(allocator.malloc(4096))
    live = session.to_raw()["memprof"]
    if is_taken_back:
        allocator.record("all", "python", 10_000, [], False)
    kept.append(allocator.malloc(2048))
    session.stop()
    line, facts = line_of(session), session.to_raw()["memprof"]
    assert line.history.value == "complete"
    assert [note for note in line.notes if "contradict" in note] == []
    assert int(line.allocated[-1]) == 2 * 1024 + 4096 + 2048
    assert len(live["recorded"]["thinned"]) == 1
    assert facts["recorded"]["thinned"][0] == live["recorded"]["thinned"][0]
    assert len(facts["recorded"]["thinned"]) == 2
    for notes in (live["notes"], facts["notes"]):
        assert len([note for note in notes if "left events out of the memory history by skip_actions" in note]) == 1


def test_a_users_history_that_already_leaves_events_out_is_said_to_lose_them() -> None:
    allocator = Allocator()
    allocator.record("all", "python", 10_000, ["alloc"], True)
    session = started_session(allocator)
    work(allocator)
    session.stop()
    assert line_of(session).history.value == "truncated"
    assert len([n for n in session.to_raw()["memprof"]["notes"] if "leaves events out by skip_actions" in n]) == 1
