"""Which steps outside a recording are written: bounded in number, in growth, in time and on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from memprof.integrations.callback.peak_records import NewRecords
from memprof.integrations.run_recorder.background import Background
from memprof.integrations.run_recorder.output import summarise
from memprof.integrations.run_recorder.writing import Writing

from memprof.recording.recorder import RunIdentity
from tests.synthetic import SnapshotBuilder

GIB = 2**30


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_first_step_is_what_others_are_compared_with() -> None:
    records = NewRecords(clock=Clock())
    assert not records.is_one(1, 10 * GIB)
    assert not records.is_one(2, 10 * GIB + GIB // 10)  # 1%
    assert records.is_one(3, 11 * GIB)
    assert records.notes() == []


def test_slow_growth_is_seen_too() -> None:
    """One percent a step is compared with what was written, not with the step before."""
    records = NewRecords(clock=Clock())
    written = [step for step in range(1, 11) if records.is_one(step, round(GIB * 1.01**step))]
    assert written == [3, 7]  # two steps make 2.01%, four 4.06%


def test_a_run_that_grows_without_end_writes_eight() -> None:
    records = NewRecords(clock=Clock())
    written = [step for step in range(1, 1000) if records.is_one(step, round(GIB * 1.02**step))]
    assert len(written) == 8
    (note,) = records.notes()
    assert note.startswith("Step 999 had a higher peak")
    assert "8 such steps were written already" in note


def test_writing_takes_a_twentieth_of_the_time_and_a_minute_lies_between() -> None:
    clock, growth = Clock(), (n * GIB for n in range(1, 100))
    records = NewRecords(clock=clock)
    records.is_one(1, next(growth))
    assert records.is_one(2, next(growth))
    records.took(1.0)
    clock.now = 59
    assert not records.is_one(3, next(growth))
    (note,) = records.notes()
    assert "Step 3 had a higher peak, 3.00 GiB, than any step in a recording or the first one (2.00 GiB)" in note
    assert "just before" in note
    clock.now = 61
    assert records.is_one(4, next(growth))
    assert records.notes() == [], "a higher one is written"
    records.took(30.0)
    clock.now += 569
    assert not records.is_one(5, 50 * GIB)
    clock.now += 2
    assert records.is_one(6, 50 * GIB)


def test_what_is_recorded_anyway_is_no_record_again() -> None:
    records = NewRecords(clock=Clock())
    records.is_one(1, 10 * GIB)
    records.recorded(14 * GIB)
    assert not records.is_one(3, 14 * GIB)
    assert records.is_one(4, 15 * GIB)


def test_chosen_steps_are_all_that_is_written() -> None:
    records = NewRecords(wanted=False, clock=Clock())
    records.is_one(1, GIB)
    records.recorded(2 * GIB)
    assert not records.is_one(3, 5 * GIB)
    assert not records.is_one(4, 4 * GIB)
    (note,) = records.notes()
    assert note.startswith("Step 3 had a higher peak, 5.00 GiB")
    assert "because the steps to record were chosen. MemProfCallback(steps=[3]) records it." in note


class Session:
    def write(self, path: Path) -> None:
        path.write_bytes(b"x" * 1000)


def test_ranks_share_the_disk_and_what_is_deleted_is_said(tmp_path: Path) -> None:
    session: Any = Session()
    alone, one_of_two = (Writing(tmp_path / str(n), 0, n, 4000, None, RunIdentity.new()) for n in (1, 2))
    for written in (alone, one_of_two):
        for step in (1, 2, 3, 4, 5):
            written.now(session, step)
    assert [p.name[:11] for p in alone.snapshots] == ["step-000002", "step-000003", "step-000004", "step-000005"]
    assert [p.name[:11] for p in one_of_two.snapshots] == ["step-000004", "step-000005"]
    (note,) = alone.notes()
    assert note.endswith("(3.91 KiB for this rank): step-000001.rank-0.pickle.")
    assert not (tmp_path / "1" / "step-000001.rank-0.pickle").exists()


def test_work_beside_hands_results_and_errors_back_on_the_asking_thread() -> None:
    beside, got = Background(), []
    beside.start(lambda: 7, lambda result, seconds: got.append(result))
    beside.finish()
    assert got == [7]

    def fails() -> None:
        raise ValueError("disk")

    beside.start(fails, lambda result, seconds: got.append(result))
    with pytest.raises(ValueError, match="disk"):
        beside.finish()
    beside.finish()
    beside.start(lambda: 8, lambda result, seconds: got.append(result))
    beside.finish()
    assert got == [7, 8]


def test_notes_are_added_without_a_second_analysis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The JSON, the page and the table of the highest recording have them; the others' have none."""
    from memprof.advice import analyze_with_advice

    for step, size in ((1, 4 << 20), (2, 64 << 20)):
        run = SnapshotBuilder()
        run.alloc(size, "forward", "main")
        run.save(tmp_path / f"step-00000{step}.rank-0.pickle")
    low, high = sorted(tmp_path.glob("*.pickle"))
    read: list[Path] = []
    analyze = analyze_with_advice.analyze

    def counting(path: Path) -> Any:
        read.append(path)
        return analyze(path)

    monkeypatch.setattr(analyze_with_advice, "analyze", counting)
    result = summarise([low, high], tmp_path, notes=["A recording of a higher peak was deleted."])
    assert read == [low, high]
    notes = [json.loads(path.with_suffix(".json").read_text())["notes"] for path in (low, high)]
    assert [("A recording of a higher peak was deleted." in each) for each in notes] == [False, True]
    assert "A recording of a higher peak was deleted." in (tmp_path / "report.html").read_text()
    assert result.page == tmp_path / "report.html"
