"""``record`` around a hand-written loop."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memprof import analyze, load_snapshot, phase, record
from memprof.analysis.ranks.reading import RanksReader, read_ranks
from memprof.errors import InputError, UsageError
from memprof.recording.phases import ACTIVE
from memprof.recording.session import Session
from memprof.recording.trace.tensor_trace import TensorTrace
from memprof.timeline.timeline import build_timeline


def loop(path: Path, steps: int = 2, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, reference = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    with record(path, model=model, reference_model=reference, config={"lr": 0.1}, **options) as session:
        for step in range(1, steps + 1):
            session.set_step(step)
            with phase("forward"):
                loss = (model(torch.ones(4, 8)) - reference(torch.ones(4, 8)).detach()).square().sum()
            with phase("backward"):
                loss.backward()
            with phase("optimizer_step"):
                optimizer.step()
                optimizer.zero_grad()
    return model, optimizer


def test_a_loop_is_written_as_a_snapshot_anyone_can_load(tmp_path: Path) -> None:
    _, optimizer = loop(tmp_path / "run.pickle")
    snapshot = load_snapshot(tmp_path / "run.pickle")
    run = snapshot.run
    assert snapshot.kind.value == "trace"
    assert run.config == {"lr": 0.1}
    assert [mark.step for mark in run.steps] == [1, 2]
    marked = [(mark.phase, mark.step) for mark in run.phases if mark.phase != "other"]
    assert marked == [(p, s) for s in (1, 2) for p in ("forward", "backward", "optimizer_step")]
    owned = {owner.category for owner in run.owners}
    assert owned == {"weights", "reference_model", "gradients", "optimizer_state"}
    states = sum(t.nbytes for slots in optimizer.state.values() for t in slots.values())
    line = build_timeline(snapshot)
    seen = {owner.address for owner in run.owners if owner.category == "optimizer_state"}
    held = line.alive_at(line.n_events)
    assert sum(int(line.size[r]) for r in held if int(line.address[r]) in seen) == states
    assert run.versions["torch"] == torch.__version__
    assert run.host is not None
    assert run.host.rss_bytes
    assert run.host.rss_bytes > 2**20
    peaks = {(row.phase, row.step): row.allocated_peak or 0 for row in run.counters}
    assert max(peaks.values()) == line.max_requested


def test_recordings_of_several_processes_are_put_together(tmp_path: Path) -> None:
    """Nobody told them that they are one run, so nothing says that they are not."""
    paths = [tmp_path / f"rank{rank}.pickle" for rank in (0, 1)]
    for path in paths:
        loop(path, 1)
        run = load_snapshot(path).run
        assert run.run_id is None
        assert run.run_started is not None
    read = [read_ranks(places, RanksReader(lambda p: analyze(p).report)).report for places in (paths, [tmp_path])]
    assert [[rank.rank for rank in report.ranks] for report in read] == [[0, 1], [0, 1]]


def test_gradients_are_known_without_any_mark(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with record(tmp_path / "run.pickle", model=model):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    owned = [owner.category for owner in load_snapshot(tmp_path / "run.pickle").run.owners]
    assert owned.count("gradients") == 2
    assert owned.count("optimizer_state") == 2


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    path, run = tmp_path / "run.pickle", os.getpid()
    with record(path):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            assert not path.exists()
    if os.getpid() != run:
        os._exit(0)
    assert path.exists()


def fail(then: Callable[[], Any] = lambda: None) -> None:
    then()
    raise ZeroDivisionError


def test_an_exception_passes_and_the_snapshot_is_there(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), record(tmp_path / "run.pickle"), phase("reward"):
        fail()
    assert ACTIVE == []
    run = load_snapshot(tmp_path / "run.pickle").run
    assert [mark.phase for mark in run.phases if mark.phase != "other"] == ["reward"]


def test_an_exception_wins_over_a_snapshot_that_cannot_be_written(tmp_path: Path) -> None:
    target = tmp_path / "run.pickle"

    def watched() -> None:
        with record(target):
            fail(target.mkdir)  # now in the way

    with pytest.warns(UserWarning, match="memprof .* goes on: .*run.pickle"), pytest.raises(ZeroDivisionError):
        watched()


def test_a_recording_that_cannot_begin_lets_the_code_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memprof.recording.trace.tensor_trace._visible_storages", fail)
    with pytest.warns(UserWarning, match="stopped watching .* Lost:"):
        loop(tmp_path / "run.pickle")
    assert not (tmp_path / "run.pickle").exists()
    assert ACTIVE == []


def test_nothing_runs_when_the_target_is_impossible(tmp_path: Path) -> None:
    for target in (tmp_path, tmp_path / "no" / "run.pickle"):
        with pytest.raises(InputError, match="cannot be written"), record(target):
            pytest.fail("the block ran")
    for options, words in (({"kind": "cuda", "device": "cpu"}, "needs a CUDA"), ({"kind": "both"}, "'auto', 'cuda'")):
        with pytest.raises(UsageError, match=words), record(tmp_path / "run.pickle", **options):
            pytest.fail("the block ran")


def test_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPROF", "0")
    loop(tmp_path / "run.pickle")
    assert list(tmp_path.iterdir()) == []


def test_recordings_nest(tmp_path: Path) -> None:
    with record(tmp_path / "outer.pickle"):
        a = torch.ones(10)
        with record(tmp_path / "inner.pickle"), phase("generate"):
            b = torch.ones(20)
    outer, inner = (load_snapshot(tmp_path / f"{n}.pickle") for n in ("outer", "inner"))
    assert len(build_timeline(outer)) > len(build_timeline(inner)) - 2
    for snapshot in (outer, inner):
        assert "generate" in {mark.phase for mark in snapshot.run.phases}
    assert a.numel() + b.numel() == 30


def test_a_mistake_of_ours_costs_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memprof.recording.owners.OwnershipRegistry.claim_gradients", lambda _: 1 / 0)
    with pytest.warns(UserWarning, match="memprof failed and stopped watching") as caught:
        loop(tmp_path / "run.pickle")
    assert len([w for w in caught if "memprof" in str(w.message)]) == 1
    notes = load_snapshot(tmp_path / "run.pickle").run.notes
    assert "ZeroDivisionError" in notes[0]


def test_only_plain_data_is_pickled(tmp_path: Path) -> None:
    class Level(int):
        pass

    with record(tmp_path / "run.pickle", config={"a": Level(3), "b": {1, 2}, "c": torch.float32, "d": True}):
        pass

    class Refusing(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise AssertionError(f"{module}.{name}")

    with open(tmp_path / "run.pickle", "rb") as file:
        config = Refusing(file).load()["memprof"]["config"]
    assert config == {"a": 3, "b": [1, 2], "c": "torch.float32", "d": True}


def test_importing_record_needs_no_torch() -> None:
    code = "import sys, memprof.recording as r; r.phase('load').__enter__(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_generator_that_another_thread_closes_leaves_no_mode_behind(tmp_path: Path) -> None:
    def batches() -> Iterator[int]:
        with record(tmp_path / "run.pickle", stacks=None), phase("generate"):
            yield torch.ones(2**10).numel()

    before = sys.getprofile()
    generator = batches()
    assert next(generator) == 2**10
    thread = threading.Thread(target=generator.close)
    thread.start()
    thread.join()
    assert ACTIVE == []
    held = torch.ones(2**12)  # not recorded any more
    assert float(held.sum()) == 2**12
    assert _get_current_dispatch_mode_stack() == []
    assert sys.getprofile() is before
    marks = load_snapshot(tmp_path / "run.pickle").run.phases
    assert [mark.phase for mark in marks if mark.phase != "other"] == ["generate"]
    loop(tmp_path / "again.pickle")
    assert _get_current_dispatch_mode_stack() == []


def test_a_second_write_equals_the_first_whatever_happens_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of writing differed, and so did what was marked, counted and claimed after the end."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    session = Session(TensorTrace(torch.device("cpu")))
    session.add_model(model, "policy")
    session.start()

    def step(number: int) -> list[torch.Tensor]:
        session.set_step(number)
        with phase("forward"):
            loss = model(torch.ones(4, 8)).sum()
        mark = session.enter_phase("backward")
        loss.backward()
        if mark is not None:
            session.exit_phase(mark)
        optimizer.step()
        session.add_tokens(4)
        session.add_batch(1, 2, 3)
        session.add_lengths([(1, 2)])
        session.look_again()
        return [torch.ones(2**20)]

    kept = step(1)
    session.stop()
    first = session.to_raw()

    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) + timedelta(hours=1)

    monkeypatch.setattr("memprof.recording.session.datetime", Later)
    kept = step(2)
    model.to(torch.float64)
    kept.clear()
    gc.collect()
    assert session.to_raw() == first
