"""Train as trl_grpo.py does, with the lean trainer: the import and one line differ.

    python examples/lean_grpo.py [--tiny] [--out FOLDER]

Trains a LoRA adapter of SmolLM2-135M for two steps on the CPU (``--tiny``: a random model, seconds).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig

from memprof import MemProfCallback
from memprof.demo.data import load_questions
from memprof.demo.model import prepare_checkpoint
from memprof.demo.rewards import REWARDS
from memprof.grpo import LeanGRPOTrainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("grpo"))
    arguments = parser.parse_args()
    trainer = LeanGRPOTrainer(
        model=str(prepare_checkpoint(arguments.out / "_model", tiny=arguments.tiny).path),
        reward_funcs=list(REWARDS),
        args=GRPOConfig(
            output_dir=str(arguments.out),
            per_device_train_batch_size=8,
            num_generations=8,
            max_completion_length=16 if arguments.tiny else 64,
            max_steps=2,
            learning_rate=1e-4,
            beta=0.04,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list([question.as_row() for question in load_questions(8).items]),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[MemProfCallback()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
