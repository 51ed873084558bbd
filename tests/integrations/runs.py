"""Real trainers on a tiny random model: the same call with and without a callback."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

WORDS = [f"w{i}" for i in range(90)]
QUESTIONS = [" ".join(random.Random(i).choices(WORDS, k=4 + i % 5)) for i in range(24)]


def length_reward(completions: list[str], **_: Any) -> list[float]:
    """Different for almost any two random completions, so that there is something to learn."""
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


def checkpoint(folder: Path) -> Path:
    """A Qwen2 of 50,000 parameters and a word tokenizer, saved so that TRL can load the reference from a path."""
    path = folder / "tiny-qwen2"
    if not path.is_dir():
        from transformers import Qwen2Config, Qwen2ForCausalLM

        words = tokenizer()
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=len(words),
            hidden_size=40,
            intermediate_size=104,
            num_hidden_layers=2,
            num_attention_heads=5,
            num_key_value_heads=1,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=words.bos_token_id,
            eos_token_id=words.eos_token_id,
            pad_token_id=words.pad_token_id,
        )
        Qwen2ForCausalLM(config).save_pretrained(path)
        words.save_pretrained(path)
    return path


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    core = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    # Old versions of TRL hand token types on to models that take none.
    return PreTrainedTokenizerFast(tokenizer_object=core, model_input_names=["input_ids", "attention_mask"], **special)


def grpo(
    model: Path | str,
    out: Path,
    callbacks: Iterable[Any] = (),
    *,
    lora: bool = False,
    reward: Callable[..., list[float]] | list[Any] = length_reward,
    questions: int = 24,
    **settings: Any,
) -> Any:
    """A ``GRPOTrainer`` ready to train: two optimizer steps of four completions unless ``settings`` say otherwise."""
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    chosen = {
        "max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 12,
        "beta": 0.04, "learning_rate": 1e-2, "gradient_checkpointing": False, "bf16": False, "use_cpu": True,
        "dataloader_pin_memory": False, "seed": 3, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True,
    }  # fmt: skip
    peft = None
    if lora:
        from peft import LoraConfig

        peft = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    rewards = reward if isinstance(reward, list) else [reward]
    data = Dataset.from_list([{"prompt": q} for q in QUESTIONS[:questions]])
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=rewards,
        args=GRPOConfig(output_dir=str(out), **{**chosen, **settings}),
        train_dataset=data,
        processing_class=tokenizer(),
        eval_dataset=data.select(range(4)) if settings.get("eval_strategy") or settings.get("eval_on_start") else None,
        callbacks=list(callbacks),
        peft_config=peft,
        reward_processing_classes=[tokenizer() if hasattr(r, "parameters") else None for r in rewards],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def plain(model: Path | str, out: Path, callbacks: Iterable[Any] = (), **settings: Any) -> Any:
    """A ``transformers.Trainer`` on the same model."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainingArguments

    chosen = {
        "max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "use_cpu": True, "seed": 3,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    rows = [{"input_ids": [5 + (i * j) % 60 for j in range(16)]} for i in range(16)]
    data = Dataset.from_list([{**row, "labels": row["input_ids"]} for row in rows])
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=TrainingArguments(output_dir=str(out), **{**chosen, **settings}),
        train_dataset=data,
        callbacks=list(callbacks),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def outcome(trainer: Any) -> dict[str, Any]:
    """Everything a run computed that does not depend on the clock."""
    clocked = ("step_time", "runtime", "per_second", "memory")
    logs = [{k: v for k, v in row.items() if not any(c in k for c in clocked)} for row in trainer.state.log_history]
    digest = hashlib.sha256()
    for name, parameter in sorted(trainer.model.named_parameters()):
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return {"logs": repr(logs), "parameters": digest.hexdigest()}


def rewards_varied(trainer: Any) -> bool:
    """Whether there was anything to learn in every step."""
    spreads = [row["reward_std"] for row in trainer.state.log_history if "reward_std" in row]
    return bool(spreads) and all(s > 0 for s in spreads)
