"""A search leaves out micro-batches that repeat the one before them: what it says of a run stays the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.simulate.conftest import TINY

pytestmark = [pytest.mark.trl]


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Return a function that simulates a run of seven micro-batches a step, and returns its snapshot."""
    from memprof.config.gpus import gpu_of
    from memprof.config.settings import Settings
    from memprof.simulate.run import simulate_settings

    (tmp_path / "config.json").write_text(json.dumps(TINY))

    def simulated(growth: bool, **asked: Any) -> Any:
        settings = Settings(model=str(tmp_path), dtype="bfloat16", gradient_accumulation_steps=7, **asked)
        return simulate_settings(settings, gpu=gpu_of("RTX 4090"), growth=growth)

    return simulated


_GRPO = {
    "prompt_length": 16, "completion_length": 8, "per_device_train_batch_size": 1, "num_generations": 7,
    "steps_per_generation": 7,
}  # fmt: skip


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({**_GRPO, "lora_r": 8}, id="adapter", marks=pytest.mark.heavy),
        pytest.param(
            {**_GRPO, "steps_per_generation": 14, "num_generations": 14}, id="two steps a generation",
            marks=pytest.mark.heavy,
        ),
        pytest.param({"trainer": "sft", "max_length": 32, "generation": "none"}, id="sft"),
    ],
)
def test_peaks_and_times_are_those_of_all_micro_batches(run: Any, asked: dict[str, Any]) -> None:
    whole, short = run(True, **asked), run(False, **asked)
    assert len(short["device_traces"][0]) < len(whole["device_traces"][0])
    for name in ("allocated_bytes", "reserved_bytes"):
        assert short["memprof"]["highest"][name] == whole["memprof"]["highest"][name]
    one, other = (raw["memprof"]["estimated_time"] for raw in (whole, short))
    assert other["step_s"] == pytest.approx(one["step_s"], rel=1e-9)


def test_each_generation_is_run(run: Any) -> None:
    """A generation batch that lasts for two micro-batches of seven begins four times a step; no other counts as one."""
    asked = {**_GRPO, "per_device_train_batch_size": 2, "steps_per_generation": 2, "num_generations": 4}
    whole, short = run(True, **asked), run(False, **asked)
    phases = [[p["phase"] for p in raw["memprof"]["phases"]].count("generate") for raw in (whole, short)]
    assert phases[0] == phases[1] > 2
    one, other = (raw["memprof"]["estimated_time"] for raw in (whole, short))
    assert other["phases"] == pytest.approx(one["phases"], rel=1e-9)


def test_a_plan_knows_how_many_are_run() -> None:
    from memprof.plan import planner
    from memprof.simulate.shortcuts import micro_batches

    assert planner._MOST_RUN == micro_batches.MOST_RUN
