"""GRPO steps with images: a real TRL step on the CPU and its simulation, sizes of images, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memprof.config.settings import Settings
from memprof.errors import InputError, UsageError
from tests.simulate.trainer.vision_models import VISION, written


@pytest.mark.trl
@pytest.mark.slow
@pytest.mark.usefixtures("only_new_tensors")
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen2_vl", {}),
        ("qwen2_5_vl", {"gradient_checkpointing": False, "gradient_accumulation_steps": 2}),
        ("qwen2_5_vl", {"lora_r": 3, "beta": 0.1}),
        ("gemma3", {}),
        ("gemma3", {"lora_r": 3, "num_iterations": 2}),
    ],
)
def test_a_step_with_images_holds_what_trls_does(
    kind: str, changes: dict[str, Any], settings_for: Callable[..., Any], tmp_path: Path
) -> None:
    from benchmarks.simulator.real_step import compare, run_real
    from memprof.simulate.run import simulate_settings

    settings = settings_for(
        model=written(kind, tmp_path / "m"), images=2, image_size="40x24", prompt_length=64, device="cpu",
        generation="none", **changes,
    )  # fmt: skip
    found = compare(simulate_settings(settings, stacks=False), run_real(settings, str(tmp_path)))
    assert {"forward", "backward", "optimizer_step"} <= {row["phase"] for row in found["training"]}
    for row in found["training"]:
        mine, theirs = row["peak_bytes"]
        assert mine == pytest.approx(theirs, rel=0.002), row
