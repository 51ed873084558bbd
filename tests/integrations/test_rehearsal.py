"""A rehearsed run is the run that would have been, and its rehearsal is the worst there can be."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from memprof.integrations.callback.callback import MemProfCallback
from memprof.integrations.run_recorder.state_backup import StateBackup

from memprof import analyze, load_snapshot
from memprof.snapshot.recorded_run import PhaseMark
from tests.integrations.conftest import wrapped
from tests.integrations.runs import QUESTIONS, grpo, length_reward, outcome, plain, rewards_varied

pytestmark = pytest.mark.trl
COMPLETION = 12
LONGEST = max(len(q.split()) for q in QUESTIONS)


def rehearsing(folder: Path, **options: Any) -> MemProfCallback:
    return MemProfCallback(folder, rehearse=True, table=False, **options)


def spans(path: Path) -> tuple[PhaseMark, ...]:
    return load_snapshot(path).run.phases


@pytest.mark.parametrize(
    "settings",
    [
        {"lora": False, "gradient_accumulation_steps": 2, "steps_per_generation": 2, "per_device_train_batch_size": 4},
        {"lora": True, "gradient_checkpointing": True, "num_iterations": 2},
    ],
    ids=["full", "lora"],
)
def test_the_run_afterwards_is_the_same_to_the_bit(model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    calls: list[int] = []

    def reward(completions: list[str], **rest: Any) -> list[float]:
        calls.append(len(completions))
        # Drawn from every generator there is: a run whose random numbers moved would differ.
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return [r + noise * i / 100 for i, r in enumerate(length_reward(completions, **rest))]

    alone = grpo(model, tmp_path / "a", reward=reward, **settings)
    alone.train()
    assert rewards_varied(alone)
    counted, calls[:] = list(calls), []
    callback = rehearsing(tmp_path / "r")
    watched = grpo(model, tmp_path / "b", [callback], reward=reward, **settings)
    kept = {id(p) for p in watched.model.parameters()}
    watched.train()
    assert outcome(watched) == outcome(alone)
    assert calls == counted  # rehearsing calls nobody's reward function
    assert {id(p) for p in watched.model.parameters()} == kept
    assert wrapped(watched) == set()
    path = tmp_path / "r" / "step-000000.rank-0.pickle"
    assert callback.result.snapshots[0] == path
    assert {s.within for s in spans(path) if s.phase == "generate"} == {"rehearsal"}
    assert {s.phase for s in spans(path) if s.within == "rehearsal"} >= {"forward", "backward", "optimizer_step"}


def test_it_generates_to_the_end_from_the_longest_prompt_for_the_whole_batch(model: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    callback = rehearsing(tmp_path / "r")
    trainer = grpo(model, tmp_path / "a", [callback], gradient_accumulation_steps=2)
    compute = trainer.compute_loss

    def compute_loss(model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        seen.append((inputs["prompt_ids"].shape[1], inputs["completion_ids"].shape[1]))
        assert bool(inputs["completion_mask"].all()) or len(seen) > 2
        return compute(model, inputs, *args, **kwargs)

    trainer.compute_loss = compute_loss
    trainer.train()
    assert seen[:2] == [(LONGEST, COMPLETION)] * 2
    rehearsed, real = (analyze(p) for p in callback.result.snapshots[:2])
    assert rehearsed.timeline.peak_instant > 0
    # Nothing of the run is larger, but for what an earlier rollout left: ids and log-probs of a few tokens here.
    for phase in ("generate", "forward", "backward"):
        worst, most = (max(p.allocated_bytes for p in run.phases if p.phase == phase) for run in (rehearsed, real))
        assert worst >= most * 0.99, phase


def test_a_plain_trainers_longest_example_fills_the_batch(model: Path, tmp_path: Path) -> None:
    def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(r["input_ids"]) for r in rows)
        lengths.append((len(rows), longest))
        ids = torch.tensor([list(r["input_ids"]) + [0] * (longest - len(r["input_ids"])) for r in rows])
        return {"input_ids": ids, "labels": ids}

    from datasets import Dataset

    lengths: list[tuple[int, int]] = []
    results = []
    for rehearse in (False, True):
        callback = MemProfCallback(tmp_path / str(rehearse), rehearse=rehearse, table=False)
        trainer = plain(model, tmp_path / "a", [callback], max_steps=2)
        trainer.train_dataset = Dataset.from_list([{"input_ids": [5] * n} for n in (4, 9, 31, 7, 8, 5, 6, 3)])
        trainer.data_collator = padded
        if rehearse:
            lengths.clear()
        trainer.train()
        results.append(outcome(trainer))
    assert results[0] == results[1]
    assert lengths[0] == (2, 31)


def test_what_does_not_fit_fails_before_the_first_step(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fits = MemProfCallback(tmp_path / "a", table=False, steps=[1])
    short = {"questions": 2, "max_completion_length": 40}
    trainer = grpo(model, tmp_path / "x", [fits], **short)
    trainer.train()
    (peak,) = [fits.result.reports[p].peak.allocated_bytes for p in fits.result.snapshots]
    steps: list[int] = []

    def reward(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        steps.append(trainer_state.global_step)
        return length_reward(completions)

    callback = rehearsing(tmp_path / "r", capacity=peak * 3 // 4)
    trainer = grpo(model, tmp_path / "y", [callback], reward=reward, **short)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert steps == []
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    oom = callback.result.reports[tmp_path / "r" / "step-000000.rank-0.pickle"].oom
    assert oom is not None
    assert oom.step == 0
    assert "memprof: Out by " in capfd.readouterr().err


def test_a_rehearsal_that_cannot_run_costs_one_warning(model: Path, tmp_path: Path) -> None:
    alone = grpo(model, tmp_path / "a")
    alone.train()
    trainer = grpo(model, tmp_path / "b", [rehearsing(tmp_path / "r")])
    compute = trainer.compute_loss
    calls = iter(range(100))

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 0:
            raise ZeroDivisionError("in the rehearsal")
        return compute(*args, **kwargs)

    trainer.compute_loss = compute_loss
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    assert [str(w.message) for w in caught if "could not rehearse" in str(w.message)]
    assert outcome(trainer) == outcome(alone)


def test_what_is_kept_comes_back_whatever_was_done() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)

    def step() -> None:
        layer(torch.rand(8, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()

    class Owner:
        pass

    owner = Owner()
    owner.numbers, owner.table, owner.tensor = [1, 2], {"a": [3.0]}, torch.ones(3)  # type: ignore[attr-defined]
    step()
    state = {k: v.clone() for k, v in layer.state_dict().items()}
    moments = {p: s["exp_avg"].clone() for p, s in optimizer.state.items()}
    gradients = [p.grad for p in layer.parameters()]
    numbers = owner.numbers  # type: ignore[attr-defined]
    kept = StateBackup(layer, optimizer, [owner])
    draws = (torch.rand(3), random.random(), np.random.rand())
    layer.eval()
    optimizer.param_groups[0]["lr"] = 5.0
    optimizer.zero_grad()
    step()
    numbers.append(9)
    owner.table["b"] = owner.table.pop("a")  # type: ignore[attr-defined]
    owner.tensor += 1  # type: ignore[attr-defined]
    owner.new = 1  # type: ignore[attr-defined]
    kept.restore()
    assert all(torch.equal(v, state[k]) for k, v in layer.state_dict().items())
    assert all(torch.equal(s["exp_avg"], moments[p]) for p, s in optimizer.state.items())
    assert all(p.grad is g for p, g in zip(layer.parameters(), gradients, strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert layer.training
    assert vars(owner).keys() == {"numbers", "table", "tensor"}
    assert owner.numbers is numbers  # type: ignore[attr-defined]
    assert (numbers, owner.table) == ([1, 2], {"a": [3.0]})  # type: ignore[attr-defined]
    assert torch.equal(owner.tensor, torch.ones(3))  # type: ignore[attr-defined]
    again = (torch.rand(3), random.random(), np.random.rand())
    assert torch.equal(draws[0], again[0])
    assert draws[1:] == again[1:]
