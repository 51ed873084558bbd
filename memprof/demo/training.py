"""Train one GRPO run with TRL; the call is the same with and without a callback, so that the two can be compared."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memprof.demo.data import WordProblem
from memprof.demo.model import Checkpoint
from memprof.demo.rewards import REWARDS

# Logged figures that depend on the clock and not on the training.
_CLOCK_KEYS = ("step_time", "runtime", "_per_second", "memory/")


@dataclass(frozen=True)
class Recipe:
    """Describe what is trained: the full model with a reference model beside it, or adapters under checkpointing."""

    name: str
    title: str
    lora: bool


FULL = Recipe("full", "full fine-tuning with a reference model", lora=False)
LORA = Recipe("lora", "LoRA with gradient checkpointing", lora=True)


@dataclass(frozen=True)
class Scale:
    """Set how much is trained. One step has ``completions`` answers, all to one question."""

    steps: int = 2
    completions: int = 4
    completion_tokens: int = 128
    seed: int = 7


@dataclass(frozen=True)
class TrainedRun:
    """A run's result: the metrics of each step, the digest of all trainable ``parameters`` after it, and how many of
    its ``trainable`` tensors it ``moved``."""

    metrics: list[dict[str, float]]
    parameters: str
    moved: int
    trainable: int

    @property
    def reward_stds(self) -> list[float]:
        """Return the standard deviation of the rewards within each step's group."""
        return [row["reward_std"] for row in self.metrics if "reward_std" in row]

    @property
    def learned(self) -> bool:
        """Tell whether the run trained anything: rewards varied and parameters moved."""
        return self.moved > 0 and any(std > 0 and math.isfinite(std) for std in self.reward_stds)


def train(
    recipe: Recipe,
    scale: Scale,
    checkpoint: Checkpoint,
    questions: Sequence[WordProblem],
    work_dir: Path,
    callbacks: Iterable[Any] = (),
) -> TrainedRun:
    """Train ``recipe`` once, from the same seed every time."""
    trainer = build_trainer(recipe, scale, checkpoint, questions, work_dir, callbacks)
    before = _digests(trainer.model)
    trainer.train()
    after = _digests(trainer.model)
    return TrainedRun(
        metrics=[_comparable(row) for row in trainer.state.log_history],
        parameters=hashlib.sha256("".join(after.values()).encode()).hexdigest(),
        moved=sum(before[name] != after[name] for name in before),
        trainable=len(before),
    )


def build_trainer(
    recipe: Recipe,
    scale: Scale,
    checkpoint: Checkpoint,
    questions: Sequence[WordProblem],
    work_dir: Path,
    callbacks: Iterable[Any] = (),
) -> Any:
    """Build the ``GRPOTrainer`` of :func:`train` without starting it."""
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOTrainer

    trainer = GRPOTrainer(
        model=str(checkpoint.path),
        reward_funcs=list(REWARDS),
        args=_arguments(recipe, scale, work_dir),
        train_dataset=Dataset.from_list([question.as_row() for question in questions]),
        callbacks=list(callbacks),
        peft_config=lora_config() if recipe.lora else None,
    )
    trainer.remove_callback(PrinterCallback)  # it prints raw dictionaries to stdout
    return trainer


def _arguments(recipe: Recipe, scale: Scale, work_dir: Path) -> Any:
    import torch
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(work_dir),
        max_steps=scale.steps,
        per_device_train_batch_size=scale.completions,
        num_generations=scale.completions,
        max_completion_length=scale.completion_tokens,
        beta=0.04,
        learning_rate=1e-4 if recipe.lora else 1e-5,
        gradient_checkpointing=recipe.lora,
        bf16=False,  # TRL's default is bf16 autocast, which is very slow on CPUs without bf16
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=scale.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def lora_config() -> Any:
    """Return the adapter of the LoRA run: rank 16 on every linear layer but the head."""
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def _digests(model: Any) -> dict[str, str]:
    """Return a digest of the bytes of each trainable parameter."""
    import torch

    with torch.no_grad():
        return {
            name: hashlib.blake2b(parameter.cpu().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }


def _comparable(row: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a log row that must be equal with and without a callback."""
    return {
        key: float(value)
        for key, value in row.items()
        if isinstance(value, (int, float)) and not any(word in key for word in _CLOCK_KEYS)
    }
