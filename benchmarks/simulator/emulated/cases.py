"""Name the runs that are made on the emulated device and simulated: settings, a GPU, and how the model gets there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memprof.config.settings import Settings

_QWEN, _QWEN_LARGER = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"
_QWEN3, _LLAMA_1B, _LLAMA_3B = "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-3B-Instruct"
_LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


@dataclass(frozen=True)
class Case:
    """Hold one run. ``loaded``: the trainer is given the model's name, and loads its checkpoint itself."""

    name: str
    card: str
    settings: Settings
    loaded: bool = False


def _case(name: str, card: str, model: str = _QWEN, loaded: bool = False, **changes: Any) -> Case:
    values: dict[str, Any] = {
        "dtype": "bfloat16", "prompt_length": 64, "completion_length": 192, "generation": "none",
        "attn": "auto", **changes,
    }  # fmt: skip
    return Case(name, card, Settings(model=model, **values), loaded)


_ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
_LONG = {"prompt_length": 512, "completion_length": 1536}
_LEAN = {"recipe": "lean", "lora_r": 16}
_QLORA = {"load_in_4bit": True, "lora_r": 16}

CASES: tuple[Case, ...] = (
    _case("0.5B, full", "H100"),
    _case("0.5B, full, no checkpointing", "H100", gradient_checkpointing=False),
    _case("0.5B, full, selective checkpointing", "H100", gradient_checkpointing="selective"),
    _case("0.5B, full, offloaded checkpointing", "H100", gradient_checkpointing="offloaded"),
    _case("0.5B, full, fp32 under autocast", "H100", dtype="float32"),
    _case("0.5B, full, fp32 under autocast, no checkpointing", "A100-80GB", dtype="float32",
          gradient_checkpointing=False),
    _case("0.5B, full, reference, loaded by name", "A100-40GB", loaded=True, beta=0.04),
    _case("0.5B, full, accumulation 4", "L40S", **_ACCUMULATED),
    _case("0.5B, full, accumulation 4, two iterations", "H100", num_iterations=2, **_ACCUMULATED),
    _case("0.5B, full, foreach AdamW", "H100", optim="adamw_torch"),
    _case("0.5B, full, SGD", "H100", optim="sgd"),
    _case("0.5B, full, Adafactor", "H100", optim="adafactor"),
    _case("0.5B, full, expandable segments", "H100", alloc_conf="expandable_segments:True"),
    _case("0.5B, full, loaded by name", "H100", loaded=True),
    _case("0.5B, full, 64 tokens generated", "H100", generation="hf", completion_length=64),
    _case("0.5B, LoRA, 128 tokens generated", "RTX 4090", lora_r=16, generation="hf", completion_length=128),
    _case("0.5B, LoRA", "V100-16GB", lora_r=16, dtype="float16", mixed_precision="no"),
    _case("0.5B, LoRA, reference", "H100", lora_r=16, beta=0.04),
    _case("0.5B, LoRA, expandable segments, no checkpointing", "A100-80GB", lora_r=16, gradient_checkpointing=False,
          alloc_conf="expandable_segments:True"),
    _case("Qwen3-0.6B, full, 4 × 2048 tokens", "RTX 3090", _QWEN3, per_device_train_batch_size=4, num_generations=4,
          **_LONG),
    _case("1B, full", "RTX 5090", _LLAMA_1B),
    _case("1B, LoRA on q and v", "T4", _LLAMA_1B, lora_r=8, lora_target_modules=("q_proj", "v_proj"), dtype="float16",
          mixed_precision="no"),
    _case("1.5B, LoRA, reference", "A10G", _QWEN_LARGER, lora_r=16, beta=0.04),
    _case("3B, LoRA, loaded by name", "A6000", _LLAMA_3B, loaded=True, lora_r=16),
    _case("8B, LoRA", "H200", _LLAMA, lora_r=16),
    _case("8B, LoRA, reference, 8 × 2048 tokens", "B200", _LLAMA, lora_r=64, beta=0.04, **_LONG),
    _case("0.5B, lean, full", "H100", recipe="lean"),
    _case("0.5B, lean, LoRA", "RTX 4090", **_LEAN),
    _case("0.5B, lean, LoRA, reference", "RTX 4090", beta=0.04, **_LEAN),
    _case("0.5B, lean, LoRA, tiles of 256 tokens", "L4", tiled_mlp=256, **_LEAN),
    _case("0.5B, lean, LoRA, prefix sharing", "RTX 5090", prefix_sharing=True, **_LEAN),
    _case("0.5B, lean, LoRA, offloaded checkpointing", "A10G", gradient_checkpointing="offloaded", **_LEAN),
    _case("0.5B, lean, LoRA, pieces of 512 tokens", "RTX 4090", max_tokens_per_piece=512, **_LEAN),
    _case("8B, lean, LoRA, 4 × 2048 tokens", "RTX 4090", _LLAMA, per_device_train_batch_size=4, num_generations=4,
          **_LEAN, **_LONG),
    _case("0.5B, QLoRA", "H100", loaded=True, **_QLORA),
    _case("0.5B, QLoRA, no checkpointing", "RTX 4090", loaded=True, gradient_checkpointing=False, **_QLORA),
    _case("0.5B, QLoRA in fp16, double quantisation", "T4", loaded=True, dtype="float16", mixed_precision="no",
          bnb_4bit_use_double_quant=True, **_QLORA),
    _case("1B, QLoRA", "A10G", _LLAMA_1B, loaded=True, **_QLORA),
    _case("8B, QLoRA", "RTX 4090", _LLAMA, loaded=True, **_QLORA),
)  # fmt: skip
