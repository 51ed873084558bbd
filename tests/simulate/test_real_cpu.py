"""A real TRL step on the CPU and its simulation are the same allocations, in the same order."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.trl, pytest.mark.slow]
TRAINING = ("reference_logprobs", "forward", "backward", "optimizer_step")


def _real(settings: Any, folder: str) -> dict[str, Any]:
    import torch
    from memprof.integrations.seams import Seams
    from memprof.integrations.trainer_phases import TrainerPhases
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl import GRPOTrainer

    from memprof.record.session import Session
    from memprof.record.tensor_trace import TensorTrace
    from memprof.simulate import trl_recipe

    checkpoint = str(Path(folder) / "model")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(settings.model)).save_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, settings.dtype))
    session = Session(TensorTrace(torch.device("cpu")))
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=trl_recipe._reward,
        args=trl_recipe._arguments(settings, folder),
        train_dataset=trl_recipe._dataset(settings),
        processing_class=trl_recipe._tokenizer(None),
        peft_config=trl_recipe._adapter(settings),
    )
    session.add_model(trainer.model, "policy")
    if trainer.ref_model is not None:
        session.add_model(trainer.ref_model, "reference")
    _prepare_rollout(trainer, settings)
    session.start()
    seams = Seams(session.fail, lambda error: None)
    phases = TrainerPhases(trainer, seams)
    phases.current = session
    trainer.add_callback(trl_recipe._steps_callback(session, phases))
    try:
        trainer.train()
    finally:
        seams.restore()
        session.stop()
    return session.to_raw()


def _prepare_rollout(trainer: Any, settings: Any) -> None:
    from memprof.simulate.rollout import fake_rollout

    fake_rollout(trainer, settings)
    if settings.generation == "hf":
        del trainer._generate_single_turn  # TRL's own; no token it can sample ends a sequence
        trainer.generation_config.eos_token_id = trainer.generation_kwargs["eos_token_id"] = [99_998, 99_999]


def _births(raw: dict[str, Any], step: int, phase: str) -> list[tuple[int, str]]:
    found = []
    for event in raw["device_traces"][0]:
        if event["action"] == "alloc":
            tags = dict(p.split("=", 1) for p in event["user_metadata"][8:].split(";") if "=" in p)
            if tags.get("step") == str(step) and tags.get("phase") == phase:
                found.append((event["size"], tags.get("op", "")))
    return found


def _peaks(raw: dict[str, Any]) -> dict[tuple[Any, str], int]:
    from memprof.analysis import analyze
    from memprof.snapshot.reader import snapshot_from_raw

    return {(p.step, p.phase): p.allocated_bytes for p in analyze(snapshot_from_raw(raw)).phases}


@pytest.mark.parametrize(
    "changes",
    [
        {"beta": 0.1, "gradient_checkpointing": False, "gradient_accumulation_steps": 2},
        {"lora_r": 3, "beta": 0.1},
    ],
    ids=["full with reference", "LoRA with checkpointing"],
)
def test_training_is_the_same_allocation_by_allocation(
    settings_for: Callable[..., Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    from memprof.simulate.run import simulate_settings

    settings = settings_for(device="cpu", generation="none", **changes)
    simulated = simulate_settings(settings, stacks=False)
    real = _real(settings, str(tmp_path))
    for step in (1, 2):
        for phase in TRAINING:
            mine, theirs = _births(simulated, step, phase), _births(real, step, phase)
            assert mine, (step, phase)
            assert [size for size, _ in mine] == [size for size, _ in theirs], (step, phase)
            differing = {(a, b) for (_, a), (_, b) in zip(mine, theirs, strict=True) if a != b}
            # The fake mode takes the norm of several tensors apart into one a tensor, of the same size.
            assert differing <= {("aten.linalg_vector_norm.default", "aten._foreach_norm.Scalar")}, (step, phase)
    mine_peaks, real_peaks = _peaks(simulated), _peaks(real)
    for key in ((s, p) for s in (1, 2) for p in TRAINING):
        # A real trace also counts the few scalars of this process that are not the run's.
        assert mine_peaks[key] == pytest.approx(real_peaks[key], abs=256), key


def test_generations_peak_is_found_without_generating(settings_for: Callable[..., Any]) -> None:
    from memprof.simulate.run import simulate_settings

    settings = settings_for(device="cpu", generation="hf")
    mine = _peaks(simulate_settings(settings, stacks=False))
    with tempfile.TemporaryDirectory() as folder:
        theirs = _peaks(_real(settings, folder))
    for step in (1, 2):
        assert mine[step, "generate"] == pytest.approx(theirs[step, "generate"], rel=0.02)
