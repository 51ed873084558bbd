"""Tiny models that see: a Qwen2-VL, a Qwen2.5-VL with windows of attention and a Gemma 3, as folders with a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_TEXT: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 3,
}  # fmt: skip
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
_PATCHES = {"depth": 2, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
_TOKENS = {"image_token_id": 50, "vision_start_token_id": 51, "vision_end_token_id": 52, "video_token_id": 53}
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "architectures": ["Qwen2VLForConditionalGeneration"], "text_config": {**_TEXT, **_SECTIONS}, **_TOKENS,
        "vision_config": {**_PATCHES, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "text_config": {**_TEXT, **_SECTIONS}, **_TOKENS,
        "vision_config": {**_PATCHES, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24,
                          "window_size": 16, "fullatt_block_indexes": [1]},
    },
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 4, "image_token_index": 50,
        "boi_token_index": 51, "eoi_token_index": 52,
        "text_config": {**_TEXT, "head_dim": 8, "sliding_window": 64},
        "vision_config": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
                          "num_attention_heads": 2, "image_size": 32, "patch_size": 8},
    },
}  # fmt: skip


def written(kind: str, folder: Path) -> str:
    """Write the tiny model's config, and for Qwen a processor's limits; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **VISION[kind]}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 256, "max_pixels": 4096}))
    return str(folder)
