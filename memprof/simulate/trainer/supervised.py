"""Build TRL's ``SFTTrainer`` or ``DPOTrainer`` for a simulated run, over rows of the settings' length."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from memprof.config.optimizers import optimizer
from memprof.config.settings import Settings, TrainerSettings
from memprof.foreign import Kwargs

_DPO_BETA = 0.1  # TRL's default, where the settings leave GRPO's


def supervised_trainer(settings: Settings, model: Any, tokenizer: Any, adapter: Any, unattended: Kwargs) -> Any:
    """Make the trainer of these settings. Rows are not packed; DPO's reference is a second model or an adapter's base.

    The tokenizer reads ``a`` as one token; ``unattended`` are the arguments of every simulated trainer.
    """
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    sft = settings.trainer == "sft"
    batch = settings.per_device_train_batch_size * settings.gradient_accumulation_steps * settings.gpus
    count = batch * unattended["max_steps"]
    given = {
        "model": model,
        "processing_class": tokenizer,
        "peft_config": adapter,
        "train_dataset": Dataset.from_list([_row(settings)] * count),
    }
    arguments = {**_arguments(settings), **unattended}
    with _no_progress():
        if sft:
            return SFTTrainer(args=SFTConfig(packing=False, **arguments), **given)
        return DPOTrainer(args=DPOConfig(beta=settings.beta or _DPO_BETA, **arguments), **given)


@contextlib.contextmanager
def _no_progress() -> Iterator[None]:
    """Draw no bars while the made-up rows are tokenized."""
    import datasets

    drawn = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if drawn:
            datasets.enable_progress_bars()


def _row(settings: TrainerSettings) -> dict[str, Any]:
    """Make one row: tokens, or a pair of texts, to which TRL adds the token that ends them."""
    if settings.trainer == "sft":
        return {"input_ids": [0] * settings.sequence_length}
    text = " ".join("a" * (settings.completion_length - 1))
    return {"prompt": "a " * settings.prompt_length, "chosen": text, "rejected": text}


def _arguments(settings: TrainerSettings) -> Kwargs:
    replaced = settings.optim == "none" or optimizer(settings.optim).modelled  # once the trainer is built
    return {
        "per_device_train_batch_size": settings.per_device_train_batch_size,
        "gradient_accumulation_steps": settings.gradient_accumulation_steps,
        "gradient_checkpointing": bool(settings.gradient_checkpointing),
        "optim": "adamw_torch" if replaced else optimizer(settings.optim).argument or settings.optim,
        "bf16": settings.mixed_precision == "bf16",
        "fp16": settings.mixed_precision == "fp16",
        "max_grad_norm": settings.max_grad_norm,
        "max_length": None,  # rows are as long as they are to be
        **settings.trainer_options.to_dict(),
    }
