"""A real TRL step on the CPU and its simulation are the same allocations, in the same order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulator.real_step import TRAINING, births, compare, peaks, run_real

pytestmark = [pytest.mark.trl, pytest.mark.slow, pytest.mark.usefixtures("only_new_tensors")]
# The fake mode takes the norm of several tensors apart into one a tensor, of the same size.
SAME = {("aten.linalg_vector_norm.default", "aten._foreach_norm.Scalar")}


@pytest.mark.parametrize(
    ("changes", "phases"),
    [
        (
            {"beta": 0.1, "gradient_checkpointing": False, "gradient_accumulation_steps": 2},
            {"reference_logprobs", "forward", "backward", "optimizer_step"},
        ),
        ({"lora_r": 3, "beta": 0.1}, {"reference_logprobs", "forward", "backward", "optimizer_step"}),
        ({"gradient_checkpointing": "selective"}, {"forward", "backward", "optimizer_step"}),
        ({"num_iterations": 2}, {"old_logprobs", "forward", "backward", "optimizer_step"}),
    ],
    ids=["full with reference", "LoRA with checkpointing", "selective checkpointing", "old log-probabilities"],
)
def test_training_is_the_same_allocation_by_allocation(
    settings_for: Callable[..., Any], changes: dict[str, Any], phases: set[str], tmp_path: Path
) -> None:
    from memprof.simulate.run import simulate_settings

    settings = settings_for(device="cpu", generation="none", **changes)
    simulated = simulate_settings(settings, stacks=False)
    real = run_real(settings, str(tmp_path))
    found = compare(simulated, real)
    assert {row["phase"] for row in found["training"]} == phases
    for row in found["training"]:
        where = (row["step"], row["phase"])
        assert row["differences"] == [], where
        # A real trace also counts the few scalars of this process that are not the run's.
        mine, theirs = row["peak_bytes"]
        assert mine == pytest.approx(theirs, abs=256), where
    for step in (1, 2):
        for phase in TRAINING:
            both = zip(births(simulated, step, phase), births(real, step, phase), strict=True)
            assert {(a, b) for (_, a), (_, b) in both if a != b} <= SAME


@pytest.mark.parametrize(
    ("changes", "reference"),
    [
        ({"gradient_checkpointing": False, "gradient_accumulation_steps": 2}, True),
        pytest.param({"lora_r": 3}, True, marks=pytest.mark.heavy),  # GRPO's above differ as much
        pytest.param({"num_iterations": 2, "beta": 0.0}, False, marks=pytest.mark.heavy),
        pytest.param({"recipe": "lean", "lora_r": 3}, True, marks=pytest.mark.heavy),
    ],
    ids=["a reference model", "the adapter off", "two iterations", "the lean trainer"],
)
def test_rloo_is_the_same_allocation_by_allocation(
    settings_for: Callable[..., Any], changes: dict[str, Any], reference: bool, tmp_path: Path
) -> None:
    """The KL is in the reward: the reference's and the old log-probabilities are computed before the loss."""
    from memprof.simulate.run import simulate_settings

    settings = settings_for(trainer="rloo", device="cpu", generation="none", **{"beta": 0.05, **changes})
    found = compare(simulate_settings(settings, stacks=False), run_real(settings, str(tmp_path)))
    expected = {"old_logprobs", "forward", "backward", "optimizer_step", *(["reference_logprobs"] if reference else [])}
    assert {row["phase"] for row in found["training"]} == expected
    for row in found["training"]:
        where = (row["step"], row["phase"])
        if settings.recipe == "trl":  # the lean trainer looks at its masks on the host, which a CPU's trace sees
            assert row["differences"] == [], where
        mine, theirs = row["peak_bytes"]
        assert mine == pytest.approx(theirs, abs=256), where


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"trainer": "sft"}, marks=pytest.mark.heavy),
        {"trainer": "sft", "lora_r": 3, "gradient_checkpointing": False, "gradient_accumulation_steps": 2},
        {"trainer": "dpo"},
        pytest.param({"trainer": "dpo", "lora_r": 3}, marks=pytest.mark.heavy),
    ],
    ids=["SFT", "SFT of an adapter, accumulated", "DPO with a reference model", "DPO with the adapter off"],
)
def test_other_trainers_are_the_same_allocation_by_allocation(
    settings_for: Callable[..., Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    from memprof.simulate.run import simulate_settings

    settings = settings_for(device="cpu", max_length=32, **changes)
    found = compare(simulate_settings(settings, stacks=False), run_real(settings, str(tmp_path)))
    assert {(row["step"], row["phase"]) for row in found["training"]} == {
        (step, phase) for step in (1, 2) for phase in ("forward", "backward", "optimizer_step")
    }
    for row in found["training"]:
        assert row["differences"] == [], (row["step"], row["phase"])
        mine, theirs = row["peak_bytes"]
        assert mine == pytest.approx(theirs, abs=256)


def test_what_a_comparison_would_not_overlook(settings_for: Callable[..., Any], tmp_path: Path) -> None:
    from memprof.simulate.run import simulate_settings

    settings = settings_for(device="cpu", generation="none", completion_length=5)
    one, other = (simulate_settings(s, stacks=False) for s in (settings, settings.with_(completion_length=6)))
    found = compare(one, other)
    assert all(row["differences"] for row in found["training"] if row["phase"] == "forward")
    assert any(row["peak_error_percent"] for row in found["training"])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generations_peak_is_found_without_generating(
    settings_for: Callable[..., Any], tmp_path: Path, cache: str
) -> None:
    from memprof.simulate.run import simulate_settings

    settings = settings_for(device="cpu", generation="hf", cache_implementation=cache, dtype="bfloat16")
    mine, theirs = peaks(simulate_settings(settings, stacks=False)), peaks(run_real(settings, str(tmp_path)))
    for step in (1, 2):
        assert mine[step, "generate"] == pytest.approx(theirs[step, "generate"], rel=0.02)


def test_a_reward_models_peak(settings_for: Callable[..., Any], tiny: str, tmp_path: Path) -> None:
    from memprof.simulate.run import simulate_settings

    settings = settings_for(device="cpu", generation="none", reward_model=tiny)
    mine, theirs = peaks(simulate_settings(settings, stacks=False)), peaks(run_real(settings, str(tmp_path)))
    for step in (1, 2):
        assert mine[step, "reward"] == pytest.approx(theirs[step, "reward"], rel=0.02)
