# mypy: ignore-errors
"""GRPO as TRL did it before its chunked loss: whole logits, then a log-softmax, in a user's subclass."""

from __future__ import annotations

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer


class FullLogitsTrainer(GRPOTrainer):
    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **kwargs
    ):
        logits = model(input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=logits_to_keep + 1).logits
        logits = logits[:, :-1] / self.temperature
        index = input_ids[:, -logits_to_keep:]
        chosen = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        logps = chosen - torch.stack([row.logsumexp(-1) for row in logits])
        entropies = None
        if compute_entropy:
            with torch.no_grad():
                p = torch.softmax(logits, -1)
                entropies = torch.logsumexp(logits, -1) - (p * logits).sum(-1)
        return logps, entropies, None


def words(completions, **kwargs):
    return [len(set(text.split())) + sum(map(len, text.split())) / 100 for text in completions]


def main(model_path, prompts, grpo, lora=None, reward_model=None, on_cpu_first=None):
    trainer = FullLogitsTrainer(
        model=model_path,
        reward_funcs=words,
        args=GRPOConfig(**grpo),
        train_dataset=Dataset.from_list([{"prompt": p} for p in prompts]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(model_path),
    )
    trainer.train()
    return trainer
