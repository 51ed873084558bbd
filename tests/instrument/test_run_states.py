"""The states of a run, whoever drives it: what each event writes, and that a run ends once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from memprof.integrations.run_recorder.recorder import Driver, RunRecorder, State

from memprof.recording import phases
from memprof.recording.api import make_recorder
from memprof.recording.guard import FailureGuard
from memprof.recording.session import Session


class Driven:
    """A run without anything that drives it; ``events`` are what a driver hears."""

    def __init__(self, folder: Path, ring: bool = False) -> None:
        self.folder = folder
        self.events: list[str] = []
        self.guard = FailureGuard("run")
        driver = Driver(
            unhook=lambda: self.events.append("unhook"),
            session_ends=lambda session: self.events.append("session ends"),
            ended=lambda failed: self.events.append("failed" if failed else "ended"),
            report=lambda waited_for: self.events.append("report" if waited_for else "no report"),
        )
        self.recorder = RunRecorder(folder, self.guard, driver, ring=ring)
        self.guard.on_failure(self.recorder.abandon)

    def record(self, step: int) -> None:
        self.recorder.step = step
        if self.recorder.session is None:
            session = Session(make_recorder(torch.device("cpu"), "trace"))
            self.recorder.begin(session)
            session.set_step(step)
        self.recorder.record(step)
        torch.zeros(64)

    @property
    def written(self) -> list[int]:
        return [int(path.name[5:11]) for path in sorted(self.folder.glob("*.pickle"))]


@pytest.fixture(params=[False, True], ids=["sessions", "ring"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Driven:
    return Driven(tmp_path, request.param)


def test_recordings_are_written_one_by_one_and_the_last_at_the_end(run: Driven) -> None:
    recorder = run.recorder
    assert recorder.state is State.FOLLOWING
    run.record(1)
    assert recorder.state is State.RECORDING
    recorder.write_recording()
    recorder.write_recording()  # nothing is in progress
    assert (recorder.state, run.written) == (State.FOLLOWING, [1])
    run.record(3)
    assert recorder.finish() is False
    assert (recorder.state, recorder.failed, recorder.session, run.written) == (State.ENDED, False, None, [1, 3])
    ends = run.events.count("session ends")
    assert ends == (1 if recorder._ring else 2)
    assert [event for event in run.events if event != "session ends"] == ["unhook", "ended", "report"]
    recorder.end()
    recorder.write_recording()
    assert run.events.count("unhook") == run.events.count("ended") == 1
    assert phases.ACTIVE == []


def test_an_exception_writes_what_is_recorded(run: Driven) -> None:
    run.record(2)
    run.recorder.end_by(ValueError())
    assert (run.recorder.state, run.recorder.failed, run.written) == (State.ENDED, True, [2])
    assert run.events[-2:] == ["failed", "report"]


def test_between_recordings_an_exception_writes_what_a_ring_holds(run: Driven) -> None:
    run.record(1)
    run.recorder.write_recording()
    run.recorder.step = 5
    run.recorder.end_by(ValueError())
    assert run.written == ([1, 5] if run.recorder._ring else [1])


def test_a_mistake_of_memprofs_ends_the_run_and_writes_nothing(run: Driven) -> None:
    run.record(2)
    with pytest.warns(UserWarning, match="stopped watching"):
        run.guard(lambda: 1 / 0)
    assert (run.recorder.state, run.recorder.failed, run.written) == (State.ENDED, True, [])
    assert sorted(run.events) == ["failed", "session ends", "unhook"]
    assert phases.ACTIVE == []
    assert run.recorder.finish() is False  # what was written before is reported
    assert run.events[3:] == ["report"]


def test_a_rehearsal_is_decided_by_who_rehearses(run: Driven) -> None:
    recorder = run.recorder
    recorder.rehearse()
    run.record(0)
    recorder.end_by(ValueError())
    assert (recorder.state, run.written) == (State.REHEARSING, [])
    recorder.rehearsed(keep=False)
    assert (recorder.state, recorder.first_step) == (State.FOLLOWING, None)
    assert (recorder.session is None) != recorder._ring
    recorder.rehearse()
    run.record(0)
    recorder.rehearsed()
    assert recorder.state is State.RECORDING
    recorder.write_recording()
    assert run.written == [0]
    recorder.end()
    recorder.rehearsed()
    assert recorder.is_over


def test_sigterm_writes_and_unhooks_nothing(run: Driven) -> None:
    run.record(4)
    run.recorder._terminate()
    assert (run.recorder.state, run.written, run.events) == (State.ENDED, [4], ["failed", "report"])
    run.recorder.stop()
