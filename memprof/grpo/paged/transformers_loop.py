"""Stand in for the decoding loop of transformers' ``generate``, which prepares everything before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.grpo.paged.rolling import RollingBatch
from memprof.grpo.paged.sampling import Sampling
from memprof.grpo.paged.schedule import GenerationCounts, PoolSize


def decode_in_pool(
    model: Any,
    input_ids: torch.Tensor,
    *,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    size: PoolSize,
    work: GenerationCounts,
    free: Callable[[], None] | None = None,
    **inputs: Any,
) -> torch.Tensor:
    """Decode prompts in a rolling batch: what ``generate`` calls where it is given as ``custom_generate``.

    ``input_ids [sequences, prompt]`` are padded on the left, as ``attention_mask`` among ``inputs`` says; what is
    returned, ``[sequences, prompt + longest]``, is padded on the right.

    Raises:
        NotPaged: the settings need the whole batch.
    """
    count, prompt = input_ids.shape
    sampling = Sampling.of(logits_processor, stopping_criteria, generation_config, count, prompt)
    prompts = prompts_of(input_ids, inputs.get("attention_mask"))
    found = RollingBatch(model, prompts, sampling, size, work, free).run()
    longest = max(map(len, found))
    padding = generation_config.pad_token_id
    fill = next(iter(sampling.stop), 0) if padding is None else int(padding)
    padded = [tokens + [fill] * (longest - len(tokens)) for tokens in found]
    return torch.cat([input_ids, torch.tensor(padded, device=input_ids.device)], dim=1)


def prompts_of(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    """Read each prompt's tokens without its padding."""
    kept = torch.ones_like(input_ids) if mask is None else mask
    return [ids[keep].tolist() for ids, keep in zip(input_ids.cpu(), kept.bool().cpu(), strict=True)]
