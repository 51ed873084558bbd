"""What scores completions: a function that allocates nothing, or a reward model whose forward TRL executes."""

from __future__ import annotations

from typing import Any

import torch

from memprof.simulate.models import build_model, load_config
from memprof.simulate.settings import Settings

__all__ = ["RewardTokenizer", "reward_function", "reward_model"]


def reward_function(completions: list[Any], **_: Any) -> list[float]:
    """A score for each completion, so that a group's differ."""
    return [float(i % 2) for i in range(len(completions))]


def reward_model(settings: Settings) -> Any:
    """The model named by ``settings.reward_model``, built without weights, giving one number a sequence.

    TRL loads it with the policy's arguments: in the dtype asked for, or in its checkpoint's where none was (bfloat16
    where its config names none).

    Raises:
        InputError: there is no config of that name, or transformers has no such model that scores sequences.
    """
    config = load_config(str(settings.reward_model))
    config.num_labels = 1
    dtype = settings.dtype
    if dtype == "float32":
        dtype = str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.")
    return build_model(config, dtype, scores=True).requires_grad_(False)


class RewardTokenizer:
    """Stands for the reward model's tokenizer: every text becomes as many tokens as the policy's."""

    pad_token_id = 1
    pad_token = eos_token = "<pad>"

    def __init__(self, settings: Settings) -> None:
        self._tokens = settings.sequence_length

    def __call__(self, text: list[str], **_: Any) -> dict[str, Any]:
        ids = torch.zeros(len(text), self._tokens, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
