"""Compute SFT's loss from logits in full, as TRL's releases before its fused head did."""

from __future__ import annotations

from typing import Any

import torch

from memprof.compat import transformers as transformers_names
from memprof.compat.patching import bind
from memprof.simulate.trainer.recipes import entropy_of


def loss_with_full_logits(trainer: Any) -> None:
    """Make an ``SFTTrainer`` use the model's own loss over ``[rows, tokens, vocabulary]`` logits."""
    bind(trainer, transformers_names.LOSS, _loss)


def _loss(
    self: Any, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
) -> Any:
    """Follow TRL 0.2x's ``SFTTrainer.compute_loss``: transformers' loss, then entropy and accuracy of the logits."""
    labels = inputs["labels"]
    inputs["use_cache"] = False
    loss, outputs = transformers_names.LOSS.get()(
        self, model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
    )
    with torch.no_grad():
        mask = inputs["attention_mask"]
        torch.sum(entropy_of(outputs.logits) * mask) / mask.sum()
        shifted = outputs.logits[..., :-1, :].contiguous()
        wanted = labels[..., 1:].contiguous()
        predictions = shifted.argmax(dim=-1)
        scored = wanted != -100
        correct = (predictions == wanted) & scored
        correct.sum(), scored.sum()
    return (loss, outputs) if return_outputs else loss
