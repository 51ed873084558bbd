"""Choose how many sequences generate together: as many as their keys and values leave room for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memprof.compat.peft import CONFIGS
from memprof.config.model_shape import ModelShape
from memprof.grpo import device as machine
from memprof.grpo.step.context import StepContext

__all__ = ["cache_bytes", "decode_bytes", "prompt_bytes", "sequences_together"]

#: Share of the memory that is free which generation plans with: the rest is for fragmentation and activations.
_SHARE = 0.85
# Copies of one position's logits alive in a decode step: the model's, fp32's, sorted ones and probabilities.
_LOGITS_COPIES = 6
# Tensors of a layer alive at its highest while a prompt goes through it: of the model's width, and of the MLP's inner
# one, without adapters and with (whose own are fp32 beside a bf16 model).
_WIDE, _INNER = (8, 13), (3, 6)


def cache_bytes(config: Any, tokens: int, itemsize: int) -> int:
    """Reckon one sequence's keys and values: ``2 * layers * kv_heads * head_dim * tokens * itemsize`` bytes.

    Layers that see a window hold at most the window.
    """
    return ModelShape.of(config).kv_cache_bytes(tokens, itemsize)


def decode_bytes(config: Any, tokens: int, itemsize: int) -> int:
    """What one more sequence costs while it decodes: its cache, one layer of it twice (transformers' cache grows by
    concatenation), and its logits."""
    shape = ModelShape.of(config)
    cache = shape.kv_cache_bytes(tokens, itemsize)
    return cache + cache // shape.layers + _LOGITS_COPIES * 4 * shape.vocabulary


def prompt_bytes(config: Any, tokens: int, itemsize: int, *, adapters: bool, tile: int | None) -> tuple[int, int]:
    """What a prompt of ``tokens`` costs while it goes through the model: its cache and one layer's tensors.

    Returns what each sequence adds, and what all share: with the MLP in tiles of ``tile`` tokens, one tile's.
    """
    shape = ModelShape.of(config)
    network = _INNER[adapters] * shape.intermediate * itemsize
    each = shape.kv_cache_bytes(tokens, itemsize) + tokens * _WIDE[adapters] * shape.hidden * itemsize
    return (each + tokens * network, 0) if tile is None else (each, tile * network)


def sequences_together(step: StepContext, prompt_ids: Sequence[Sequence[int]]) -> int:
    """Choose how many sequences generate at once.

    ``generation_batch`` decides where it is given. Else, on CUDA, as many as fit into what is free now; elsewhere all.
    """
    count = max(1, len(prompt_ids))
    if step.settings.generation_batch is not None:
        return min(count, int(step.settings.generation_batch))
    device = step.accelerator.device
    if machine.device_kind(device) != "cuda" or step.settings.generation_cache == "offloaded":
        return count
    prompt = max(map(len, prompt_ids), default=0)
    model = step.base_model()
    size = model.dtype.itemsize
    adapters = CONFIGS.of(step.policy) is not None
    prefill, shared = prompt_bytes(model.config, prompt, size, adapters=adapters, tile=step.tile)
    decode = decode_bytes(model.config, prompt + step.completion_length, size)
    room = int(_SHARE * machine.free_bytes(device))
    return max(1, min(count, room // decode, (room - shared) // prefill))
