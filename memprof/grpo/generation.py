"""Choose how many sequences generate together: as many as their keys and values leave room for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from memprof.compat.peft import CONFIGS
from memprof.config.model_shape import ModelShape
from memprof.grpo import device as machine
from memprof.grpo.step.context import StepContext

__all__ = ["PassSize", "cache_bytes", "decode_bytes", "prompt_bytes", "sequences_together"]

#: Share of the memory that is free which generation plans with: the rest is for fragmentation and activations.
_SHARE = 0.85
# Copies of one position's logits alive in a decode step: the model's, fp32's, sorted ones and probabilities.
_LOGITS_COPIES = 6
# Tensors of a layer alive at its highest while a prompt goes through it: of the model's width, and of the MLP's inner
# one, without adapters and with (whose own are fp32 beside a bf16 model).
_WIDE, _INNER = (8, 13), (3, 6)


def cache_bytes(config: Any, tokens: int, itemsize: int) -> int:
    """Reckon one sequence's keys and values: ``2 * layers * kv_heads * head_dim * tokens * itemsize`` bytes.

    Layers that see a window hold at most the window, layers of linear attention a state of fixed size.
    """
    shape = ModelShape.of(config)
    return shape.kv_cache_bytes(tokens, itemsize) + shape.state_bytes(itemsize)


def decode_bytes(config: Any, tokens: int, itemsize: int) -> int:
    """What one more sequence costs while it decodes: its cache, the largest layer of it twice (transformers' cache
    grows by concatenation), and its logits."""
    shape = ModelShape.of(config)
    growing = shape.largest_kv_cache_bytes(tokens, itemsize)
    return cache_bytes(config, tokens, itemsize) + growing + _LOGITS_COPIES * 4 * shape.vocabulary


def prompt_bytes(config: Any, tokens: int, itemsize: int, *, adapters: bool, tile: int | None) -> tuple[int, int]:
    """What a prompt of ``tokens`` costs while it goes through the model: its cache and one layer's tensors.

    Returns what each sequence adds, and what all share: with the MLP in tiles of ``tile`` tokens, one tile's.
    """
    shape = ModelShape.of(config)
    network = _INNER[adapters] * shape.intermediate * itemsize
    each = cache_bytes(config, tokens, itemsize) + tokens * _WIDE[adapters] * shape.hidden * itemsize
    return (each + tokens * network, 0) if tile is None else (each, tile * network)


def sequences_together(step: StepContext, prompt_ids: Sequence[Sequence[int]]) -> int:
    """Choose how many sequences generate at once, all passes being of like size: 8 where 7 have room are 4 and 4.

    ``generation_batch`` decides where it is given. Else, on CUDA, as many as fit into what is free now; elsewhere all.
    """
    return _evenly(max(1, len(prompt_ids)), _most_together(step, prompt_ids))


def _evenly(count: int, most: int) -> int:
    """Return the size of passes over ``count`` sequences that are as few and as equal as ``most`` together allow."""
    return math.ceil(count / math.ceil(count / most))


def _most_together(step: StepContext, prompt_ids: Sequence[Sequence[int]]) -> int:
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


class PassSize:
    """How many sequences one run's passes of ``generate`` have, once free memory has limited it.

    The size is kept, so that a seed draws the same completions however memory comes and goes; it becomes smaller where
    it has no room any more (the optimizer's state appears after the first generation).
    """

    def __init__(self) -> None:
        self._kept: int | None = None

    def of(self, step: StepContext, prompt_ids: Sequence[Sequence[int]]) -> int:
        """Return the size for these prompts, equal on all ranks, and log the passes it takes."""
        count = max(1, len(prompt_ids))
        most = step.ranks.least(_most_together(step, prompt_ids))
        if step.settings.generation_batch is None:
            most = self._keep(step, count, most)
        size = _evenly(count, most)
        passes = math.ceil(count / size)
        if passes > 1:
            step.log.say(
                f"{count} sequences generate in {passes} passes of at most {size}: about {passes} times the decode "
                "steps of one pass over all"
            )
        return size

    def _keep(self, step: StepContext, count: int, most: int) -> int:
        if most < min(count, self._kept or count):
            if self._kept is not None:
                step.log.warn(f"the free memory holds {most} sequences in generation now, and held {self._kept} before")
            self._kept = most
        return min(most, self._kept or most)
