"""The callback's way with CUDA's ring, driven by a stand-in for the allocator (``tests/recording/fake_cuda.py``).

The trainer and its steps are real and run on the CPU; what a step holds on "the device" is said by the test.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from memprof.integrations.callback import peak_records as records
from memprof.integrations.run_recorder import writing
from transformers import TrainerCallback

from memprof import MemProfCallback, load_snapshot
from memprof.errors import InputError
from memprof.recording.cuda.history import CudaHistory
from memprof.recording.recorder import DeviceInfo
from memprof.timeline.timeline import build_timeline
from tests.integrations.conftest import wrapped
from tests.integrations.runs import plain
from tests.recording.fake_cuda import Allocator

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    fake = Allocator()

    def make_recorder(*_: Any, **options: Any) -> CudaHistory:
        return CudaHistory(
            torch.device("cuda", 0), backend=fake, max_entries=options["max_entries"], stacks=options["stacks"]
        )

    monkeypatch.setattr("memprof.integrations.callback.sessions.make_recorder", make_recorder)
    monkeypatch.setattr(CudaHistory, "device", lambda self: DeviceInfo(0, "cuda", "Pretend", 24 * 10**9))
    yield fake
    assert fake.recording is None, "the history was left on"


class Uses(TrainerCallback):  # type: ignore[misc]
    """Holds so many KiB on the device for a moment in each step's forward."""

    def __init__(self, allocator: Allocator, kib: list[int]) -> None:
        self.allocator = allocator
        self.kib = kib
        self.step = 0

    def attach(self, trainer: Any) -> None:
        loss = trainer.compute_loss

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            if (kib := self.kib[self.step]) < 0:
                assert self.allocator.observer is not None
                self.allocator.observer(0, 2**40, 24 * 10**9, 5)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 GiB.")
            self.step += 1
            self.allocator.free(self.allocator.malloc(kib * 1024))
            return loss(*args, **kwargs)

        trainer.compute_loss = compute_loss


@pytest.fixture
def any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """New records may follow each other within milliseconds, as these steps do."""
    monkeypatch.setattr(records, "_SECONDS", 0.0)
    monkeypatch.setattr(records, "_SHARE", 1.0)


def train(model: Path, tmp_path: Path, allocator: Allocator, kib: list[int], **options: Any) -> MemProfCallback:
    callback = MemProfCallback(tmp_path / "r", kind="cuda", **{"report": False, **options})
    trainer = plain(model, tmp_path / "a", [callback], max_steps=len(kib))
    assert allocator.recording is not None, "the ring runs from the trainer's construction on"
    allocator.malloc(4096)  # loading
    Uses(allocator, kib).attach(trainer)
    try:
        trainer.train()
    finally:
        assert wrapped(trainer) == {"compute_loss"}  # the test's own
    return callback


def names(callback: MemProfCallback) -> list[str]:
    return [p.name for p in callback.result.snapshots]


@pytest.mark.usefixtures("any_time")
def test_the_second_step_and_every_new_record_are_written(
    model: Path, tmp_path: Path, allocator: Allocator
) -> None:
    callback = train(model, tmp_path, allocator, [100, 100, 101, 150, 120, 200])
    # Step 3 is a record by less than 2%.
    assert names(callback) == [f"step-00000{n}.rank-0.pickle" for n in (2, 4, 6)]
    last = load_snapshot(callback.result.snapshots[-1])
    assert build_timeline(last).max_requested == 200 * 1024 + 4096
    assert "load" in {mark.phase for mark in last.run.phases}
    assert [mark.step for mark in last.run.steps] == [1, 2, 3, 4, 5, 6]
    peaks = {row.step: row.allocated_peak for row in last.run.counters if row.phase == "forward"}
    assert peaks[5] == 120 * 1024 + 4096


@pytest.mark.usefixtures("any_time")
def test_a_recorded_step_is_no_new_record_at_the_next(model: Path, tmp_path: Path, allocator: Allocator) -> None:
    """As with AdamW, whose state is there from the second step on: that one is recorded, and the third is like it."""
    callback = train(model, tmp_path, allocator, [100, 130, 130, 130])
    assert names(callback) == ["step-000002.rank-0.pickle"]


@pytest.mark.usefixtures("any_time")
def test_a_growing_run_writes_few_records_and_says_which_peak_it_left_out(
    model: Path, tmp_path: Path, allocator: Allocator, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three percent more in every step: 38 new records by 2%, threefold in the end."""
    kib = [round(1000 * 1.03**i) for i in range(40)]
    callback = train(model, tmp_path, allocator, kib, report=True)
    recorded = [load_snapshot(path).run.steps[-1].step for path in callback.result.snapshots]
    assert recorded == [2, 3, 5, 8, 14, 24]  # 3, 6, 9, 19, 34% more, of 2, 4, 8, 16, 32% demanded
    assert callback.result.page is not None
    (highest,) = [r for r in callback.result.reports.values() if any("higher peak" in n for n in r.notes)]
    (note,) = [n for n in highest.notes if "higher peak" in n]
    assert note.startswith("Step 40 had a higher peak, 0.00 GiB, than any step in a recording")
    assert "MemProfCallback(steps=[40])" in note
    assert note in capsys.readouterr().out.replace("\n", " ")
    assert "Step 40 had a higher peak" in callback.result.page.read_text(encoding="utf-8")


def test_a_new_record_is_written_beside_the_training(
    model: Path, tmp_path: Path, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk hangs while step 2 is written; later steps go on, and the end waits for it."""
    steps: list[int] = []
    three, save = threading.Event(), writing.save_snapshot

    def hanging(raw: Any, path: Path) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert three.wait(60), "training waits for the disk"
        save(raw, path)

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            steps.append(state.global_step + 1)
            if state.global_step + 1 == 5:
                three.set()

    monkeypatch.setattr(writing, "save_snapshot", hanging)
    callback = MemProfCallback(tmp_path / "r", kind="cuda", report=False)
    trainer = plain(model, tmp_path / "a", [callback, Steps()], max_steps=6)
    Uses(allocator, [100] * 6).attach(trainer)
    trainer.train()
    assert steps == [1, 2, 3, 4, 5, 6]
    assert names(callback) == ["step-000002.rank-0.pickle"]
    loaded = load_snapshot(callback.result.snapshots[0])
    assert [mark.step for mark in loaded.run.steps] == [1, 2], "what it says is from before the write"


def test_a_full_disk_ends_the_recording_and_not_the_run(
    model: Path, tmp_path: Path, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(raw: Any, path: Path) -> None:
        raise InputError(f"{path}: cannot be written (No space left on device).")

    monkeypatch.setattr(writing, "save_snapshot", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        callback = train(model, tmp_path, allocator, [100] * 5)
    assert callback.result.snapshots == []


def test_an_oom_is_written_on_the_spot_and_passes_through(
    model: Path, tmp_path: Path, allocator: Allocator
) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        train(model, tmp_path, allocator, [100, 100, -1, 100], steps=[99])
    (path,) = (tmp_path / "r").glob("*.pickle")
    assert path.name == "step-000003.rank-0.pickle"
    snapshot = load_snapshot(path)
    oom = snapshot.run.oom
    assert oom is not None
    assert (oom.phase, oom.step, oom.requested_bytes) == ("forward", 3, 2**40)
    assert oom.device_free_bytes == 5
    assert any("compute_loss" in line for line in oom.stack)


def test_a_trainer_that_never_trains_leaves_nothing_when_another_does(
    model: Path, tmp_path: Path, allocator: Allocator
) -> None:
    callback = MemProfCallback(tmp_path / "r", report=False, kind="cuda")
    plain(model, tmp_path / "a", [callback])
    second = plain(model, tmp_path / "b", [callback])
    second.train()
    assert names(callback) == ["step-000002.rank-0.pickle"]
