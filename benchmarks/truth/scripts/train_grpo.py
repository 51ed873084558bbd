# mypy: ignore-errors
"""The training script the oracle watches: plain TRL, as anybody would write it."""

from __future__ import annotations

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer


def digits(completions, **kwargs):
    """More even words, more reward: varied, so that advantages are not zero."""
    return [sum(int(word[1:]) % 2 for word in text.split() if word[1:].isdigit()) / 10 for text in completions]


def main(model_path, prompts, grpo, lora=None, reward_model=None, on_cpu_first=None):
    args = GRPOConfig(**grpo)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_path)
    model = model_path
    if on_cpu_first is not None:
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, on_cpu_first))
    rewards = [digits] if reward_model is None else [digits, reward_model]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": p} for p in prompts]),
        processing_class=tokenizer,
        reward_processing_classes=[tokenizer] * len(rewards),
        peft_config=LoraConfig(**lora) if lora else None,
    )
    trainer.train()
    return trainer
