"""Say what was assumed of a run because nobody gave it, and which of it is TRL's default. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["OF_TRL", "assumed_of", "assumed_words"]

#: Settings that memory follows most, in the order in which a person should give them.
_FOLLOWED = (
    "prompt_length", "completion_length", "per_device_train_batch_size", "dtype", "lora_r", "gradient_checkpointing",
    "optim", "generation", "num_generations", "beta", "attn",
)  # fmt: skip
# What trainers of given rows do not have, or have without memory following it.
_GENERATING = {"generation", "num_generations", "beta"}
_SUPERVISED = ("sft", "dpo")
_GRPO = {
    "completion_length": 512, "per_device_train_batch_size": 8, "dtype": "float32", "lora_r": None,
    "gradient_checkpointing": True, "optim": "adamw_torch_fused", "generation": "hf", "num_generations": 8,
    "beta": 0.0, "attn": "auto",
}  # fmt: skip
_ROWS = {name: value for name, value in _GRPO.items() if name not in {*_GENERATING, "completion_length"}}
#: The defaults of each of TRL's trainers, by our names; ``max_length`` is where rows are cut.
OF_TRL: dict[str, dict[str, Any]] = {
    "grpo": _GRPO,
    "rloo": {**_GRPO, "num_generations": 2, "beta": 0.05},
    "sft": {**_ROWS, "max_length": 1024},
    "dpo": {**_ROWS, "max_length": 1024},
}


def assumed_of(given: Mapping[str, Any]) -> tuple[str, ...]:
    """List the settings that memory follows most and that ``given`` leaves open, of those that its trainer has."""
    known = set(given) - set(given.get("assumed") or ())
    if given.get("max_length"):
        known |= {"prompt_length", "completion_length"}
    if given.get("trainer") in _SUPERVISED:
        known |= _GENERATING
    return tuple(name for name in _FOLLOWED if name not in known)


def assumed_words(config: Mapping[str, Any]) -> list[str]:
    """Say what stands in ``config`` that nobody gave: first what the data or memprof chose, last TRL's own defaults."""
    trainer = str(config.get("trainer") or "grpo")
    theirs = OF_TRL.get(trainer, {})
    taken = [name for name in config.get("assumed") or () if name in config]
    ours, default = [], []
    if trainer in _SUPERVISED and {"prompt_length", "completion_length"} <= set(taken):
        rows = config["prompt_length"] + config["completion_length"]
        ours.append(f"rows of {rows} tokens (the data decide; TRL cuts at {theirs['max_length']})")
        taken = [name for name in taken if name not in ("prompt_length", "completion_length")]
    for name in taken:
        words = _words(name, config, trainer)
        if not words:
            continue
        if name not in theirs:
            ours.append(f"{words} (the data decide)")
        elif _own_checkpointing(name, config):
            ours.append(f"{words} (the lean trainer's default)")
        elif config[name] != theirs[name]:
            ours.append(f"{words} (TRL's default is {theirs[name]})")
        else:
            default.append(words)
    return [*ours, f"{', '.join(default)} (TRL's default{'s' if len(default) > 1 else ''})"] if default else ours


def _own_checkpointing(name: str, config: Mapping[str, Any]) -> bool:
    return name == "gradient_checkpointing" and config.get("recipe") == "lean"


def _words(name: str, config: Mapping[str, Any], trainer: str) -> str:
    """Write one setting as a person would say it; nothing where another setting decides it."""
    value = config[name]
    if name == "dtype":  # DeepSpeed's are bfloat16; of 4-bit weights few have it
        if config.get("load_in_4bit") or str(config.get("sharding")).startswith("zero"):
            return ""
        return f"{value} weights"
    if name == "lora_r":
        return "no LoRA" if value is None else f"LoRA of rank {value}"
    if name == "gradient_checkpointing":
        return "no checkpointing" if value in (False, "none") else "gradient checkpointing"
    unit = {"sft": "rows", "dpo": "pairs"}.get(trainer, "completions")
    return {
        "prompt_length": f"prompts of {value} tokens",
        "completion_length": f"completions of {value} tokens",
        "per_device_train_batch_size": f"{value} {unit} in a micro-batch",
        "generation": "generation by transformers" if value == "hf" else f"generation: {value}",
        "num_generations": f"{value} completions a prompt",
        "beta": f"beta {value:g}" if isinstance(value, float) else f"beta {value}",
        "attn": "PyTorch's own choice of attention" if value == "auto" else f"{value} attention",
    }.get(name, f"{name} {value}")
