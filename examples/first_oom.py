"""Run out of memory on purpose: the script of the tutorial (docs/tutorial.md).

    .venv-cuda/bin/python -m memprof emulate --gpu 2GB --no-values -- python examples/first_oom.py

Fine-tunes a Llama of 41M random parameters in full, with a reference model, on arithmetic. As it stands it needs more
than a 2 GB card has; its options are those of ``GRPOConfig`` that the tutorial changes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from memprof.demo.data import synthetic_questions
from memprof.demo.model import prepare_checkpoint
from memprof.demo.rewards import REWARDS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--per-device-train-batch-size", type=int, default=32)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--max-steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("first_oom"))
    chosen = parser.parse_args()
    trainer = GRPOTrainer(
        model=str(make_model(chosen.out / "model")),
        reward_funcs=list(REWARDS),
        args=GRPOConfig(
            output_dir=str(chosen.out),
            per_device_train_batch_size=chosen.per_device_train_batch_size,
            gradient_accumulation_steps=chosen.gradient_accumulation_steps,
            gradient_checkpointing=chosen.gradient_checkpointing,
            num_generations=8,
            max_completion_length=64,
            max_steps=chosen.max_steps,
            beta=0.04,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list([question.as_row() for question in synthetic_questions(64)]),
    )
    trainer.train()


def make_model(folder: Path) -> Path:
    """Save a Llama with random weights under ``folder``, once; TRL loads policy and reference from there."""
    if not (folder / "config.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(prepare_checkpoint(folder / "tokenizer", tiny=True).path)
        config = LlamaConfig(
            vocab_size=32_000,
            hidden_size=512,
            intermediate_size=1_408,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
