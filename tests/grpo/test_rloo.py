"""The lean RLOO trainer's loss, gradients, metrics and runs against those of TRL's ``RLOOTrainer``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from trl import RLOOConfig, RLOOTrainer

from memprof.compat.check import TARGETS
from memprof.errors import UsageError
from memprof.grpo import LeanRLOOConfig, LeanRLOOTrainer
from memprof.grpo.budget import settings_of
from tests.compat.removal import remove
from tests.grpo.trainers import (
    Rollouts,
    assert_same_step,
    batch,
    groups,
    length_reward,
    logged,
    prompts,
    randomise_adapters,
    saved_llama,
    tiny_llama,
    tokenizer,
    worst,
)

pytestmark = pytest.mark.trl

OWN = RLOOTrainer._compute_loss


def build(kind: str, model: Any, folder: Path, *, lora: bool = False, plain: bool = False, **settings: Any) -> Any:
    from peft import LoraConfig

    lean = kind == "lean"
    config: Any = LeanRLOOConfig if lean and not plain else RLOOConfig
    arguments: dict[str, Any] = {
        "use_cpu": True, "bf16": False, "per_device_train_batch_size": 4, "num_generations": 4, "beta": 0.0,
        "max_completion_length": 12, "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no",
        "logging_steps": 1, "disable_tqdm": True, "seed": 3, "learning_rate": 1e-3, **settings,
    }  # fmt: skip
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    trainer = (LeanRLOOTrainer if lean else RLOOTrainer)(
        model if isinstance(model, str) else copy.deepcopy(model),
        length_reward,
        config(str(folder / kind), **arguments),
        train_dataset=prompts(),
        processing_class=tokenizer(),
        peft_config=adapter,
    )
    if lora:
        randomise_adapters(trainer.model)
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def with_old(trainer: Any, inputs: dict[str, Any], noise: float) -> dict[str, Any]:
    """The sequences' log-probabilities before, off by ``noise``: some ratios are clipped."""
    inputs = {name: value for name, value in inputs.items() if name not in ("off_policy", "num_items_in_batch")}
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        now = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, inputs["completion_ids"].shape[1])[0]
    moved = noise * torch.randn(now.shape[0], generator=torch.Generator().manual_seed(8))
    return {**inputs, "old_logps": (now * inputs["completion_mask"]).sum(1) + moved}


def assert_same(theirs: Any, ours: Any, inputs: Any, noise: float = 0.3) -> None:
    assert_same_step(theirs, ours, with_old(theirs, inputs, noise))


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_tokens_per_piece": 40},
        {"exact_two_pass": "always", "max_tokens_per_piece": 1},
        {"prefix_sharing": True, "checkpointing": "full"},
        {"packing": True},
        {"micro_splitting": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("noise", [0.0, 0.3], ids=["on_policy", "off_policy"])
def test_loss_gradient_and_metrics_are_trls(noise: float, settings: dict[str, Any], lora: bool, tmp_path: Path) -> None:
    model = tiny_llama()
    theirs, ours = build("trl", model, tmp_path, lora=lora), build("lean", model, tmp_path, lora=lora, **settings)
    inputs = groups(6)
    inputs["advantages"][2] = 0.0
    inputs["completion_mask"][4] = 0
    assert_same(theirs, ours, inputs, noise)


def test_a_term_over_the_whole_batch_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    theirs, ours = build("trl", model, tmp_path), build("lean", model, tmp_path, max_tokens_per_piece=1)

    def coupled(self: Any, model: Any, inputs: Any) -> torch.Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        found = self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].shape[1])[0]
        each = (found * inputs["completion_mask"]).sum(1)
        loss: torch.Tensor = OWN(self, model, inputs) + (each - each.mean()).pow(2).sum()
        return loss

    monkeypatch.setattr(RLOOTrainer, "_compute_loss", coupled)
    for _ in range(2):
        assert_same(theirs, ours, batch(4))
    assert any("the loss couples sequences" in line for line in ours._once_log.said)


@pytest.mark.parametrize(("plain", "reference"), [(False, "host"), (False, "device"), (True, "auto")])
def test_a_run_with_a_reference_and_accumulation_tracks_trls(plain: bool, reference: str, tmp_path: Path) -> None:
    """Accumulated micro-batches are divided by transformers in TRL's, and in the loss here."""
    model, rollouts, runs = saved_llama(tmp_path / "model"), Rollouts(), []
    for kind in ("trl", "lean"):
        lean = {"reference": reference} if kind == "lean" and not plain else {}
        settings = {"beta": 0.05, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4, **lean}
        trainer = build(kind, model, tmp_path, plain=plain, **settings)
        rollouts.record(trainer) if kind == "trl" else rollouts.replay(trainer)
        trainer.train()
        runs.append((logged(trainer), {name: weight.clone() for name, weight in trainer.model.state_dict().items()}))
    (theirs, weights), (ours, lean_weights) = runs
    assert worst(lean_weights, weights) <= 1e-4
    for row, lean_row in zip(theirs, ours, strict=True):
        assert lean_row == pytest.approx(row, rel=1e-3, abs=2e-5, nan_ok=True)


def test_generation_in_passes(tmp_path: Path) -> None:
    ours = build("lean", tiny_llama(), tmp_path, generation_batch=2, max_steps=1)
    ours.train()
    assert ours.state.global_step == 1


@pytest.mark.heavy  # of GRPO it is held by tests/grpo/test_budget.py
def test_a_memory_budget_is_kept_by_simulating_rloos_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEMPROF_CACHE", str(tmp_path / "cache" / "plan"))
    trainer = build("lean", tiny_llama(), tmp_path, lora=True, memory_budget="1GB", generation_batch=4, beta=0.05)
    settings, _ = settings_of(trainer)
    assert (settings.trainer, settings.recipe, settings.beta) == ("rloo", "lean", 0.05)
    assert (trainer.args.checkpointing, trainer.args.generation_batch) == ("none", 4)
    assert "checkpointing=none, generation_batch=4 needs" in capsys.readouterr().out


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for target in (t for t in TARGETS if "lean.rloo" in t.needed_by):
        with monkeypatch.context() as patch:
            target.find()
            remove(target, patch)
            with pytest.raises(UsageError, match=r"^The lean RLOO trainer .* that is installed, .*\.$"):
                build("lean", tiny_llama(), tmp_path)
