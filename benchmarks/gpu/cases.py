"""Name the runs the checks execute: one set of settings for the real trainer and for the simulator alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from memprof.config.settings import Settings

_05B, _15B = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"
_LLAMA_1B, _LLAMA_8B = "meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"
_QWEN3_4B = "Qwen/Qwen3-4B"


@dataclass(frozen=True)
class Case:
    """A run by name. ``settings`` are the simulator's; the real trainer is built from the same ones."""

    name: str
    settings: Settings

    def but(self, name: str, **changes: Any) -> Case:
        """Return the same run with some settings changed."""
        return Case(f"{self.name}-{name}", self.settings.with_(**changes))


def _case(name: str, model: str, **settings: Any) -> Case:
    usual = {"prompt_length": 256, "completion_length": 128, "dtype": "bfloat16", "generation": "hf"}
    return Case(name, Settings(model=model, **{**usual, **settings}))


_FULL = _case("0.5b-full", _05B, beta=0.04, dtype="float32")
_LORA = _case("1.5b-lora", _15B, lora_r=16)

# GPU_CHECKS 1 and 2.
TRUTH = (
    _FULL,
    _FULL.but("plain", beta=0.0, gradient_checkpointing=False, dtype="bfloat16"),
    _LORA,
    _LORA.but("kl-plain", beta=0.04, gradient_checkpointing=False),
)

# GPU_CHECKS 3, beside those above.
SIMULATED = (
    _case("llama-1b-full", _LLAMA_1B),
    _case("llama-1b-padding", _LLAMA_1B, padding="worst"),
    _case("llama-1b-expandable", _LLAMA_1B, alloc_conf="expandable_segments:True"),
    _case("llama-8b-lora", _LLAMA_8B, lora_r=16),
    _case(
        "llama-8b-lora-8k", _LLAMA_8B, lora_r=16, prompt_length=8064, num_generations=2, per_device_train_batch_size=2
    ),
    _case("qwen3-4b-lora", _QWEN3_4B, lora_r=16, completion_length=256),
    _case("1.5b-adamw-torch", _15B, optim="adamw_torch"),
    _case("1.5b-8bit", _15B, optim="adamw_bnb_8bit"),
)

# GPU_CHECKS 5: each is run with TRL's trainer and with the lean one.
LEAN = (
    _case("1.5b-full", _15B, completion_length=786),
    _case("1.5b-lora", _15B, lora_r=16, completion_length=786),
    _case("8b-lora-4096", _LLAMA_8B, lora_r=16, prompt_length=3968),
    _case("8b-lora-20480", _LLAMA_8B, lora_r=16, prompt_length=20352),
)

# GPU_CHECKS 6: where the memory is to run out, and the run it happens in.
OOM = {
    "backward": _case("oom-backward", _05B, gradient_checkpointing=False, completion_length=512),
    "generate": _case("oom-generate", _05B, completion_length=512, lora_r=8),
    "optimizer_step": _case("oom-optimizer", _05B, dtype="float32", prompt_length=32, completion_length=16),
}

_TINY = "HuggingFaceTB/SmolLM2-135M-Instruct"


def shrunk(case: Case) -> Case:
    """Return the same kind of run, small enough for a CPU: it shows that the script works, and nothing about a GPU."""
    small = replace(
        case.settings, model=_TINY, prompt_length=12, completion_length=6, num_generations=2,
        per_device_train_batch_size=2, dtype="float32", mixed_precision="no", optim="adamw_torch", device="cpu",
        alloc_conf="", padding="none",
    )  # fmt: skip
    return Case(case.name, small)
