"""Simulated runs beside the same runs on the real allocator: allocated and reserved are equal, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cuda.emulated import device, run

pytestmark = [pytest.mark.slow, pytest.mark.trl]

_FP16 = {"dtype": "float16", "mixed_precision": "no"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # Cards before Ampere compute attention in full where heads are grouped.
    "T4, LoRA": ("T4", {**_FP16, "lora_r": 8}),
    "T4, generating": ("T4", {**_FP16, "lora_r": 8, "generation": "hf", "prompt_length": 400, "completion_length": 48}),
    # Free blocks of one size lie in segments older and lower ones.
    "V100, full": ("V100-16GB", {**_FP16, "gradient_checkpointing": False}),
    # The loss scaler's few numbers, and gradients unscaled before they are clipped.
    "RTX 4090, fp16, LoRA": ("RTX 4090", {"mixed_precision": "fp16", "lora_r": 8, "optim": "adamw_torch"}),
    # Stochastic rounding keeps its counts of steps on the host.
    "H100, lean": ("H100", {"dtype": "bfloat16", "recipe": "lean"}),
    # So does RMSprop.
    "L4, RMSprop": ("L4", {"dtype": "bfloat16", "optim": "rmsprop"}),
}  # fmt: skip


ROLLING = {
    "dtype": "bfloat16", "recipe": "lean", "lora_r": 8, "generation": "hf", "generation_batch": 2,
    "completion_length": 48,
}  # fmt: skip


def test_a_simulated_rolling_batch_reserves_what_the_real_one_does(tmp_path: Path) -> None:
    """Eight sequences generate over the cache of two, executed in full on the card and in a few steps on fakes."""
    told = run(
        "as_settings", {"folder": str(tmp_path), "card": "RTX 4090", "settings": ROLLING}, env=device("RTX 4090")
    )
    real, simulated = told["real"], told["simulated"]
    assert real["error"] is None
    assert simulated["reserved_bytes"] == real["reserved_bytes"]
    assert simulated["allocated_bytes"] == pytest.approx(real["allocated_bytes"], rel=1e-3)


_SEES = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
SEEING: dict[str, dict[str, Any]] = {
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 64, "image_token_index": 50,
        "text_config": {**_SEES, "head_dim": 64, "sliding_window": 512},
        "vision_config": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
                          "num_attention_heads": 4, "image_size": 224, "patch_size": 14},
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", SEEING)
def test_a_simulated_step_with_images_holds_what_the_real_one_does(kind: str, tmp_path: Path) -> None:
    settings = {"dtype": "bfloat16", "images": 2, "image_size": "320x240", "prompt_length": 260}
    shape = {"model_type": kind, **SEEING[kind]}
    told = run(
        "as_settings", {"folder": str(tmp_path), "card": "H100", "settings": settings, "shape": shape},
        env=device("H100"),
    )  # fmt: skip
    real, simulated = told["real"], told["simulated"]
    assert real["error"] is None
    assert simulated["allocated_bytes"] == pytest.approx(real["allocated_bytes"], rel=5e-3)


@pytest.mark.parametrize("name", CASES)
def test_a_simulated_run_holds_and_reserves_what_the_real_one_does(name: str, tmp_path: Path) -> None:
    card, settings = CASES[name]
    told = run("as_settings", {"folder": str(tmp_path), "card": card, "settings": settings}, env=device(card))
    real, simulated = told["real"], told["simulated"]
    assert real["error"] is None
    assert simulated["allocated_bytes"] == real["allocated_bytes"]
    assert simulated["reserved_bytes"] == real["reserved_bytes"]
