"""Printed settings are taken apart as a person would: arguments, exports, statements."""

from __future__ import annotations

import pytest

from benchmarks.advice.loop_runs import applied


def test_printed_settings_are_applied_as_they_stand() -> None:
    found = applied([
        'optim="adamw_8bit"  # pip install bitsandbytes',
        'model_init_kwargs={"dtype": "bfloat16"}, peft_config=LoraConfig(r=16)',
        "gradient_checkpointing=True; trl.models.enable(model)",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "from memprof.grpo import LeanGRPOTrainer as GRPOTrainer",
    ])  # fmt: skip
    assert found.arguments == {
        "optim": "'adamw_8bit'", "model_init_kwargs": "{'dtype': 'bfloat16'}", "peft_config": "LoraConfig(r=16)",
        "gradient_checkpointing": "True",
    }  # fmt: skip
    assert found.environment == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert found.statements == [
        "trl.models.enable(model)", "from memprof.grpo import LeanGRPOTrainer as GRPOTrainer",
    ]  # fmt: skip
    with pytest.raises(SyntaxError):
        applied(["train less"])
