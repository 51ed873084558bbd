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
    "H100, lean": ("H100", {"dtype": "bfloat16", "recipe": "lean", "max_tokens_per_piece": 1}),
    "H100, lean in one piece": ("H100", {"dtype": "bfloat16", "recipe": "lean"}),
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
        "as_settings", {"folder": str(tmp_path), "card": "RTX 4090", "settings": ROLLING},
        env=device("RTX 4090", values_max=65536, copy_max=65536),
    )  # fmt: skip
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
    "qwen2_vl": {
        "architectures": ["Qwen2VLForConditionalGeneration"], "image_token_id": 50, "vision_start_token_id": 51,
        "vision_end_token_id": 52, "video_token_id": 53,
        "text_config": {**_SEES, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                     "mrope_section": [8, 12, 12]}},
        "vision_config": {"depth": 3, "num_heads": 4, "embed_dim": 128, "hidden_size": 256, "mlp_ratio": 2},
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ["gemma3", pytest.param("qwen2_vl", marks=pytest.mark.heavy)])
def test_a_simulated_step_with_images_holds_what_the_real_one_does(kind: str, tmp_path: Path) -> None:
    """The same tensors are there at the peak, in blocks of the same sizes; one small segment more may be taken."""
    settings = {"dtype": "bfloat16", "images": 2, "image_size": "320x240", "prompt_length": 260}
    shape = {"model_type": kind, **SEEING[kind]}
    told = run(
        "as_settings", {"folder": str(tmp_path), "card": "H100", "settings": settings, "shape": shape},
        env=device("H100", values_max=65536, copy_max=65536),
    )  # fmt: skip
    real, simulated = told["real"], told["simulated"]
    assert real["error"] is None
    assert simulated["requested_bytes"] == real["requested_bytes"]
    assert simulated["allocated_bytes"] == real["allocated_bytes"]
    assert simulated["reserved_bytes"] == pytest.approx(real["reserved_bytes"], abs=2 * 2**20)


# What they hold has one of the others, too.
HEAVY = ("T4, LoRA", "RTX 4090, fp16, LoRA", "L4, RMSprop", "V100, full")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.heavy] if n in HEAVY else []) for n in CASES])
def test_a_simulated_run_holds_and_reserves_what_the_real_one_does(name: str, tmp_path: Path) -> None:
    card, settings = CASES[name]
    # Gradients that are no numbers would be scaled until none is left to step with.
    few = {} if settings.get("mixed_precision") == "fp16" else {"values_max": 65536, "copy_max": 65536}
    told = run("as_settings", {"folder": str(tmp_path), "card": card, "settings": settings}, env=device(card, **few))
    real, simulated = told["real"], told["simulated"]
    assert real["error"] is None
    assert simulated["allocated_bytes"] == real["allocated_bytes"]
    assert simulated["reserved_bytes"] == real["reserved_bytes"]


#: Allocator settings, and those of which a run on the emulator takes as long as all others.
CONFS = {
    "roundup": "roundup_power2_divisions:4",
    "split": "max_split_size_mb:32",
    "segments": "large_segment_size_mb:48",
    "rounding": "max_split_size_mb:32,max_non_split_rounding_mb:64",
    "expandable": "expandable_segments:True",
    "pages": "expandable_segments:True,large_segment_size_mb:48",
    "collecting": "garbage_collection_threshold:0.2,per_process_memory_fraction:0.012",
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "collecting" else pytest.mark.heavy) for n in CONFS])
def test_a_simulation_under_allocator_settings_reserves_what_the_real_run_does(name: str, tmp_path: Path) -> None:
    settings = {"dtype": "bfloat16", "gradient_checkpointing": False, "alloc_conf": CONFS[name]}
    env = {**device("H100", values_max=65536, copy_max=65536), "PYTORCH_CUDA_ALLOC_CONF": CONFS[name]}
    told = run("as_settings", {"folder": str(tmp_path), "card": "H100", "settings": settings}, env=env)
    real, simulated = told["real"], told["simulated"]
    assert real["error"] is None
    assert (simulated["allocated_bytes"], simulated["reserved_bytes"]) == (
        real["allocated_bytes"],
        real["reserved_bytes"],
    )
