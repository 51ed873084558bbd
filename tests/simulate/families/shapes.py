"""Shrink each family that ``docs/models.md`` lists to four layers of its own default shapes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAYERS = 4
PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_PARTS = ("text_config", "vision_config", "audio_config")
# What a family's published configs say and its default config leaves open.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [3]},
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 128},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 3},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "llama4": {"architectures": ["Llama4ForConditionalGeneration"]},
    "nemotron": {"num_key_value_heads": 8},
}


@dataclass(frozen=True)
class Family:
    """A family of the page: a model type, and why it is not simulated; empty where it is."""

    kind: str
    reason: str

    def __str__(self) -> str:
        return self.kind


def _rows() -> list[Family]:
    """Read the list of families that are simulated, then the table of those that are not."""
    simulated, _, refused = PAGE.read_text(encoding="utf-8").partition("\nThese are not.")
    table = re.findall(r"^\| `(\w+)` \|[^|]*\| (.+?) \|$", refused, re.MULTILINE)
    return [Family(kind, "") for kind in re.findall(r"`(\w+)`\s+\(", simulated)] + [Family(*row) for row in table]


FAMILIES = _rows()


def four_layers(kind: str) -> dict[str, Any]:
    """Return the values of a ``config.json``: a family's defaults with its first three layers and its last."""
    from transformers import AutoConfig

    values = _shrunk(AutoConfig.for_model(kind).to_dict())
    return values | _PUBLISHED.get(kind, {})


def _shrunk(values: dict[str, Any]) -> dict[str, Any]:
    depth = next((values[name] for name in _DEPTHS if isinstance(values.get(name), int)), None)
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in _PARTS and isinstance(value, dict):
            found[name] = _shrunk(value)
        elif name in _DEPTHS:
            found[name] = LAYERS
        elif name == "depth":  # of a vision part
            found[name] = 2
        elif name == "per_layer_config" or (name == "moe_layers" and value):
            continue  # made again from the layers' kinds
        elif isinstance(value, list) and depth and len(value) == depth:
            found[name] = [*value[: LAYERS - 1], value[-1]]
        else:
            found[name] = value
    return found
