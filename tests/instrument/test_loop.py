"""A loop without a trainer: its models, optimizers and phases are found."""

from __future__ import annotations

import gc
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from memprof.integrations.callback.options import Options
from memprof.integrations.run_recorder import output
from torch import nn

from memprof import phase, record
from memprof.instrument.loop import PlainLoop
from memprof.recording.phases import ACTIVE
from memprof.snapshot import load_snapshot

pytestmark = pytest.mark.usefixtures("only_new_tensors")


class Looped:
    """A loop run under :class:`PlainLoop`, as a script would be."""

    def __init__(self, folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        gc.collect()  # what earlier tests left is not this loop's
        self.folder = folder
        self.loop = PlainLoop(Options.of(output_dir=folder, **options), table=False)
        self.model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> None:
        for _ in range(2):
            self.model(torch.randn(32, 64)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, steps: int) -> None:
        self.loop.begin()
        for _ in range(steps):
            self.step()
        self.loop.end()

    def snapshots(self) -> list[str]:
        return sorted(p.name for p in self.folder.glob("*.pickle"))

    def spans(self, name: str) -> list[tuple[str, int | None]]:
        marks = load_snapshot(self.folder / name).run.phases
        return [(mark.phase, mark.step) for mark in marks if mark.phase != "other"]

    def run_out_in_forward(self) -> None:
        """Take one more step, in whose forward a GiB is asked for."""

        def grow(*_: Any) -> None:
            torch.empty(2**30, dtype=torch.uint8)

        self.model.register_forward_pre_hook(grow)
        with pytest.raises(torch.OutOfMemoryError):
            self.step()


@pytest.fixture(autouse=True)
def nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> Any:
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    monkeypatch.delenv("MEMPROF", raising=False)
    before = torch.autograd.backward, torch.nn.utils.clip_grad_norm_
    yield
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_pre_hooks
    assert not hooks._global_forward_hooks
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks
    assert (torch.autograd.backward, torch.nn.utils.clip_grad_norm_) == before
    assert ACTIVE == []


STEP = [("forward", 1), ("backward", 1)] * 2 + [("optimizer_step", 1)] * 2


def test_phases_of_two_steps_and_nothing_after(tmp_path: Path) -> None:
    looped = Looped(tmp_path)
    looped.run(4)
    assert looped.snapshots() == ["step-000001.rank-0.pickle"]
    assert looped.spans("step-000001.rank-0.pickle") == STEP + [(name, 2) for name, _ in STEP]
    report = json.loads((tmp_path / "step-000001.rank-0.json").read_text())
    size = sum(p.nbytes for p in looped.model.parameters())
    assert report["own_peaks"]["weights"] == size
    assert report["own_peaks"]["gradients"] == size
    assert report["own_peaks"]["optimizer_state"] == 2 * size + 4 * 4  # two moments, and a step count for each
    assert report["own_peaks"]["inputs"] >= 32 * 64 * 4
    assert report["own_peaks"]["activations"] >= 32 * 256 * 4
    assert (tmp_path / "report.html").exists()


def test_chosen_steps_are_recordings_of_their_own(tmp_path: Path) -> None:
    looped = Looped(tmp_path, steps=(2, 3, 5))
    looped.run(6)
    assert looped.snapshots() == ["step-000002.rank-0.pickle", "step-000005.rank-0.pickle"]
    assert {step for _, step in looped.spans("step-000002.rank-0.pickle")} == {2, 3}


def test_models_are_told_apart(tmp_path: Path) -> None:
    looped = Looped(tmp_path)
    reference = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).requires_grad_(False)
    judge = nn.Linear(8, 1).requires_grad_(False)
    looped.loop.begin()
    for _ in range(2):
        looped.step()
        with torch.no_grad():
            judge(reference(torch.randn(4, 64)))
    looped.loop.end()
    report = json.loads((tmp_path / "step-000001.rank-0.json").read_text())
    assert report["own_peaks"]["reference_model"] == sum(p.nbytes for p in reference.parameters())
    assert report["own_peaks"]["reward_model"] == sum(p.nbytes for p in judge.parameters())
    assert {name for name, _ in looped.spans("step-000001.rank-0.pickle")} > {"reference_logprobs", "reward"}
    assert len([n for n in report["notes"] if "was taken for" in n]) == 2


def test_the_scripts_own_marks_and_recordings_have_precedence(tmp_path: Path) -> None:
    looped = Looped(tmp_path / "loop")
    looped.loop.begin()
    with phase("reward"):
        looped.model(torch.randn(2, 64))  # nothing records yet: the loop's recording begins here
    looped.step()
    with phase("reward"):
        looped.model(torch.randn(2, 64))
    looped.loop.end()
    assert looped.spans("step-000001.rank-0.pickle")[-1][0] == "reward"
    other = Looped(tmp_path / "other")
    other.loop.begin()
    with record(tmp_path / "own.pickle", model=other.model):
        other.step()
    other.loop.end()
    assert other.snapshots() == []


def test_out_of_memory_is_written_before_anything_is_freed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "LATER", None)
    looped = Looped(tmp_path, capacity="1GiB")
    looped.loop.begin()
    looped.step()
    looped.run_out_in_forward()
    looped.loop.end()
    report = json.loads((tmp_path / "step-000001.rank-0.json").read_text())
    assert (report["oom"]["phase"], report["oom"]["step"]) == ("forward", 2)
    assert report["oom"]["requested_bytes"] == 2**30
    assert sum(report["oom"]["categories"].values()) == report["oom"]["allocated_bytes"]
    printed = capsys.readouterr().err
    lines = printed[printed.index("memprof: Out by ") :].splitlines()
    assert " in forward, step 2. " in lines[0]
    assert len(lines) <= 10
    assert any("test_loop.py" in line for line in lines)
    assert any("Optimizer state" in line for line in lines)


def test_the_last_out_of_memory_is_told_and_not_one_that_was_caught_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "LATER", None)
    looped = Looped(tmp_path, capacity="1GiB")
    looped.loop.begin()
    looped.step()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**31, dtype=torch.uint8)  # the script's own guess, which it gives up
    looped.run_out_in_forward()
    looped.loop.end()
    report = json.loads((tmp_path / "step-000001.rank-0.json").read_text())
    assert (report["oom"]["phase"], report["oom"]["step"]) == ("forward", 2)
    assert report["oom"]["requested_bytes"] == 2**30
    assert re.search(r"memprof: Out by .* in forward, step 2\. ", capsys.readouterr().err)


def test_an_out_of_memory_that_was_caught_is_not_why_a_run_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    looped = Looped(tmp_path, capacity="1GiB")
    looped.loop.begin()
    looped.step()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**31, dtype=torch.uint8)
    looped.step()
    looped.loop.end()
    assert json.loads((tmp_path / "step-000001.rank-0.json").read_text())["oom"] is None
    assert "out of memory" not in capsys.readouterr().err


def test_a_compiled_model_stays_compiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The compiler meets the hooks while it traces, and with ``fullgraph`` nothing may stop it."""
    looped = Looped(tmp_path, report=False)
    compiled = torch.compile(looped.model, backend="eager", fullgraph=True)
    looped.loop.begin()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about global hooks
        for _ in range(3):
            compiled(torch.randn(4, 64)).square().mean().backward()
            looped.optimizer.step()
    looped.loop.end()
    assert looped.snapshots() == ["step-000001.rank-0.pickle"]
    names = [name for name, _ in looped.spans("step-000001.rank-0.pickle")]
    assert names == ["forward", "backward", "optimizer_step"] * 2
    assert "failed" not in capsys.readouterr().err


def test_a_mistake_of_ours_ends_the_watching_and_not_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(PlainLoop, "_introduce", broken)
    looped = Looped(tmp_path)
    looped.run(3)
    assert looped.snapshots() == []
    assert capsys.readouterr().err.count("memprof failed and stopped watching") == 1


class Tied(nn.Module):
    """A model whose head is a matmul with its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.body = nn.Linear(16, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self.table(ids)) @ self.table.weight.T


def test_a_model_whose_forward_is_called_by_name_is_the_model(tmp_path: Path) -> None:
    looped = Looped(tmp_path)
    looped.model = Tied()  # type: ignore[assignment]
    looped.optimizer = torch.optim.AdamW(looped.model.parameters())
    looped.loop.begin()
    for _ in range(3):
        looped.model.forward(torch.arange(8)).square().mean().backward()
        looped.optimizer.step()
        looped.optimizer.zero_grad()
    looped.loop.end()
    run = load_snapshot(tmp_path / looped.snapshots()[0]).run
    assert (run.config or {})["model_name"] == "Tied"
    assert {owner.name for owner in run.owners if owner.category == "weights"} == {
        "table.weight", "body.weight", "body.bias"
    }  # fmt: skip
