"""Score completions: by a function that allocates nothing, or by a reward model whose forward TRL executes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.config.settings import Settings, TrainerSettings
from memprof.simulate.trainer.models import build_model, load_config


def reward_function(completions: list[Any], **_: Any) -> list[float]:
    """Score completions alternately 0 and 1, so that a group's differ."""
    return [float(i % 2) for i in range(len(completions))]


def reward_model(settings: Settings) -> Any:
    """Build the model named by ``settings.reward_model`` without weights; it gives one number a sequence.

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
    """Stand for the reward model's tokenizer: every text becomes as many tokens as the policy's."""

    pad_token_id = 1
    pad_token = eos_token = "<pad>"

    def __init__(self, settings: TrainerSettings) -> None:
        self._tokens = settings.sequence_length

    def __call__(self, text: list[str], **_: Any) -> dict[str, Any]:
        ids = torch.zeros(len(text), self._tokens, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def reward_named(original: Any) -> Callable[..., list[float]]:
    """Make a function that scores as :func:`reward_function` does, under the name of a script's own."""

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return reward_function(completions)

    reward.__name__ = getattr(original, "__name__", "reward")
    return reward
