"""Build the trainers that are trained for real: SmolLM2-135M on GSM8K, and the options their commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

OUT = click.option("--out", type=click.Path(path_type=Path), default=Path("demo"), help="Folder for the model.")
JSON = click.option("--json", "json_path", type=click.Path(path_type=Path), default=None)
TINY = click.option("--tiny", is_flag=True, help="A tiny random model, to try the script.")


def prepared(out: Path, tiny: bool) -> tuple[str, Any, str]:
    """Return the model's folder, questions, and what the model is."""
    from memprof.demo.data import load_questions
    from memprof.demo.model import prepare_checkpoint

    checkpoint = prepare_checkpoint(out / "_model", tiny=tiny)
    return str(checkpoint.path), load_questions(32, longest=110).items, checkpoint.note


def build(kind: str, model: str, questions: Any, folder: Path, lora: bool, **settings: Any) -> Any:
    """Build a trainer of SmolLM2 on GSM8K; ``kind`` is ``trl`` or ``lean``."""
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    from memprof.demo.rewards import REWARDS
    from memprof.demo.training import lora_config
    from memprof.grpo import LeanGRPOConfig, LeanGRPOTrainer

    chosen: Any = (GRPOTrainer, GRPOConfig) if kind == "trl" else (LeanGRPOTrainer, LeanGRPOConfig)
    arguments: dict[str, Any] = {
        "output_dir": str(folder / kind),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 32,
        "beta": 0.04,
        "learning_rate": 1e-5,
        "bf16": False,
        "use_cpu": True,
        "seed": 7,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **settings,
    }
    trainer = chosen[0](
        model=model,
        reward_funcs=list(REWARDS),
        args=chosen[1](**arguments),
        train_dataset=Dataset.from_list([question.as_row() for question in questions]),
        peft_config=lora_config() if lora else None,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
