"""The rows of the matrix: what people type, each option with each other, as commands.

All pairs of values of all options, all triples of those that decide which code trains, and all pairs of half precisions
and kinds of cache with what they meet. The shapes are the first layers of published families.
"""

from __future__ import annotations

from typing import Any

from allpairspy import AllPairs

FAMILIES = [
    *("qwen2", "llama", "qwen3", "gemma3_text", "mistral", "phi3", "qwen3_moe", "gemma2", "olmo2", "granite"),
    *("smollm3", "gpt_oss"),
]
_NOT_LORA = ""
_LORAS = [_NOT_LORA, "--lora-r 16", "--lora-r 8 --lora-target-modules q_proj,v_proj", "--lora-r 8 --lora-dropout 0.05"]
_TRAINED: dict[str, list[str]] = {
    "trainer": ["grpo", "rloo", "sft", "dpo"],
    "generation": ["hf", "none", "vllm"],
    "lora": _LORAS,
    "checkpointing": ["full", "none", "selective", "offloaded"],
    "dtype": ["bfloat16", "float32", "float16"],
    "beta": ["0", "0.04"],
}
_ALL: dict[str, list[str]] = {
    **_TRAINED,
    "family": FAMILIES,
    "recipe": ["trl", "trl-full-logits", "liger", "lean"],
    "padding": ["none", "worst"],
    "gpu": ["A100-80GB", "RTX 4090", "T4", ""],
    "accumulation": ["1", "3"],
    "iterations": ["1", "2"],
    "optim": ["adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_8bit", "adafactor", "sgd"],
    "bits": ["", "--load-in-4bit"],
    "sharding": ["", "ddp", "fsdp2", "zero2", "zero3"],
    "alloc": ["", "expandable_segments:True", "max_split_size_mb:128"],
    "batch": ["2", "4"],
    "reward": ["", "model"],
}
# What a config file says of autocast, and what the command line says of the cache.
_CACHED: dict[str, list[str]] = {
    "precision": ["fp16: true", "bf16: true", "bf16: false"],
    "cache": ["", "static", "quantized", "quantized --cache-dtype int4"],
    "dtype": ["float32", "bfloat16", "float16"],
    "family": ["qwen2", "gemma3_text", "gpt_oss", "qwen3_moe"],
    "lora": [_NOT_LORA, "--lora-r 16"],
    "trainer": ["grpo", "rloo"],
    "recipe": ["trl", "lean"],
    "beta": ["0", "0.04"],
    "sharding": ["", "ddp", "fsdp2"],
    "checkpointing": ["full", "none"],
    "generation": ["hf"],
}


def _rows(options: dict[str, list[str]], together: int) -> list[dict[str, str]]:
    return [dict(zip(options, row, strict=True)) for row in AllPairs(list(options.values()), n=together)]


PAIRS = _rows(_ALL, 2)
TRIPLES = _rows(_TRAINED, 3)
CACHES = _rows(_CACHED, 2)


def command(row: dict[str, str], model: str) -> list[str]:
    """Write a row as the arguments of ``memprof simulate``; what a trainer does not know is left out."""
    supervised = row["trainer"] in ("sft", "dpo")
    asked: dict[str, Any] = {
        "model": model,
        "trainer": row["trainer"],
        "dtype": row["dtype"],
        "gradient-checkpointing": row["checkpointing"],
        "recipe": None if supervised else row.get("recipe"),
        "padding": row.get("padding"),
        "gpu": row.get("gpu"),
        "gradient-accumulation-steps": row.get("accumulation"),
        "optim": row.get("optim"),
        "per-device-train-batch-size": row.get("batch", "2"),
        "alloc-conf": row.get("alloc"),
    }
    if row.get("sharding"):
        asked |= {"gpus": "2", "sharding": row["sharding"]}
    if supervised:
        asked["max-length"] = "24"
    else:
        asked |= {
            "generation": row["generation"], "beta": row["beta"], "num-iterations": row.get("iterations"),
            "num-generations": "2", "prompt-length": "9", "completion-length": "12",
            "reward-model": model if row.get("reward") else None,
        }  # fmt: skip
    if "precision" in row:  # which has no option of its own
        asked["config"] = f"{model}/half.yaml"
    kept, *more = row["cache"].split() if row.get("cache") else [""]
    asked["cache-implementation"] = kept
    told = [word for name, value in asked.items() if value for word in (f"--{name}", value)]
    return [*told, *row["lora"].split(), *row.get("bits", "").split(), *more]
