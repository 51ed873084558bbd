"""Name the cases: each a model and a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.truth.models import Shapes

LLAMA_1B = Shapes("Llama-3.2-1B", "llama", 16, 32, 8, 64, 2048, 8192, 128256, True, tiny_hidden=64, extra={19: 16})
TINY_LLAMA = Shapes("TinyLlama-1.1B", "llama", 22, 32, 4, 64, 2048, 5632, 32000, False, tiny_hidden=64)
QWEN3_06B = Shapes("Qwen3-0.6B", "qwen3", 28, 16, 8, 128, 1024, 3072, 151936, True)
QWEN3_17B = Shapes("Qwen3-1.7B", "qwen3", 28, 16, 8, 128, 2048, 6144, 151936, True)
QWEN2_15B = Shapes("Qwen2.5-1.5B", "qwen2", 28, 12, 2, 128, 1536, 8960, 151936, True, tiny_hidden=72)
QWEN2_05B = Shapes("Qwen2.5-0.5B", "qwen2", 24, 14, 2, 64, 896, 4864, 151936, True, tiny_hidden=84)
REWARD_05B = Shapes("Qwen2.5-0.5B", "qwen2", 24, 14, 2, 64, 896, 4864, 151936, True, tiny_head_dim=38,
                    tiny_hidden=84, tiny_ffn=149)
SMOL_17B = Shapes("SmolLM2-1.7B", "llama", 24, 32, 32, 64, 2048, 8192, 49152, True, tiny_hidden=64, extra={19: 16})
GPT_LARGE = Shapes("GPT-2-large-like", "nano", 36, 20, 20, 64, 1280, 5120, 50257, True, tiny_hidden=65)
GPT_07B = Shapes("nanoGPT-like 0.8B", "nano", 18, 12, 12, 128, 1536, 6144, 65536, False, tiny_hidden=61)


@dataclass(frozen=True)
class Case:
    """One run. ``tokens``: real tokens one tiny token stands for; lengths in tiny tokens."""

    name: str
    model: Shapes
    grpo: dict[str, Any]
    prompt: int = 24
    completion: int = 5
    tokens: int = 32
    padded: bool = False
    lora: dict[str, Any] | None = None
    on_cpu_first: str | None = None
    reward: Shapes | None = None
    about: str = ""
    full_logits: bool = False
    nano: dict[str, Any] | None = field(default=None)
    plain: dict[str, Any] | None = field(default=None)

    def batches(self) -> set[int]:
        per_step = int(self.grpo.get("per_device_train_batch_size", 8))
        several = int(self.grpo.get("steps_per_generation", 1))
        return {2**i for i in range((per_step * several).bit_length())} | {per_step, per_step * several}


PLAIN = Shapes("plain decoder", "plain", 6, 8, 8, 64, 1024, 4096, 50257, False, tiny_head_dim=46)


def _plain(name: str, about: str, **loop: Any) -> Case:
    """Return a case of ``scripts/plain_loops.py``."""
    return Case(name, PLAIN, {}, prompt=12, completion=int(loop.get("new_tokens", 0)), about=about, plain=loop)


LORA = {"r": 19, "lora_alpha": 32, "target_modules": "all-linear"}

CASES: dict[str, Case] = {c.name: c for c in (
    Case("c0_full_bf16_tied", QWEN3_17B, {
        "per_device_train_batch_size": 8, "num_generations": 4, "beta": 0.0, "gradient_checkpointing": False,
        "steps_per_generation": 2, "gradient_accumulation_steps": 1}, on_cpu_first="bfloat16", completion=3,
        about="full bf16 fine-tune without checkpointing, tied head, moved to the device by the Trainer"),
    Case("c1_lora_ckpt", LLAMA_1B, {
        "per_device_train_batch_size": 8, "num_generations": 4, "beta": 0.04,
        "model_init_kwargs": {"dtype": "bfloat16"}}, lora=LORA, completion=4,
        about="bf16 base loaded by the loader's threads, LoRA r=16 in fp32, checkpointing, reference = adapter off"),
    Case("c1b_lora_moved", replace(QWEN3_06B, extra={19: 16}), {
        "per_device_train_batch_size": 8, "num_generations": 4, "beta": 0.04, "gradient_checkpointing": False},
        lora={**LORA, "target_modules": ["q_proj", "v_proj", "o_proj"]}, on_cpu_first="bfloat16", completion=2,
        about="LoRA without checkpointing on a bf16 base that the Trainer moves to the device"),
    Case("c2_full_fp32_autocast_ref", TINY_LLAMA, {
        "per_device_train_batch_size": 4, "num_generations": 4, "beta": 0.04, "gradient_checkpointing": False},
        about="fp32 weights under bf16 autocast, a reference copy, untied head, no checkpointing"),
    Case("c3_accumulation", QWEN3_06B, {
        "per_device_train_batch_size": 4, "num_generations": 4, "beta": 0.0, "gradient_accumulation_steps": 2,
        "steps_per_generation": 4, "max_steps": 2}, on_cpu_first="bfloat16", padded=True, completion=2,
        about="gradient accumulation 2, four micro-steps per generation, padded prompts, checkpointing, tied"),
    Case("c4_reward_model", QWEN2_15B, {
        "per_device_train_batch_size": 4, "num_generations": 4, "beta": 0.0,
        "model_init_kwargs": {"dtype": "bfloat16"}}, reward=REWARD_05B,
        about="a sequence-classification reward model beside a full bf16 fine-tune with checkpointing"),
    Case("c5a_nano_cat_tied_sgd", GPT_LARGE, {}, tokens=16, nano={
        "cache": "cat", "optimizer": "sgd", "beta": 0.0, "dtype": "bfloat16", "cache_dtype": "bfloat16", "micro": 4},
        about="a hand-written loop, pure bf16: cache by torch.cat, tied head, SGD with momentum, two micro-batches"),
    Case("c5b_nano_static_adamw", GPT_07B, {}, tokens=16, nano={
        "cache": "static", "optimizer": "adamw_foreach", "autocast": True, "cache_dtype": "bfloat16"},
        about="a hand-written loop, fp32 under autocast: preallocated cache, untied head, foreach AdamW, reference"),
    Case("c5c_nano_cat_adamw_nonforeach", GPT_07B, {}, tokens=24, nano={
        "cache": "cat", "optimizer": "adamw", "dtype": "bfloat16", "cache_dtype": "bfloat16", "batch": 16, "micro": 2},
        about="a hand-written loop, pure bf16, reference copy, single-tensor AdamW, eight micro-batches accumulated"),
    Case("c6_generation_kv", SMOL_17B, {
        "per_device_train_batch_size": 2, "num_generations": 8, "beta": 0.0, "steps_per_generation": 16,
        "gradient_accumulation_steps": 1, "max_steps": 2, "model_init_kwargs": {"dtype": "bfloat16"}},
        lora={**LORA, "target_modules": ["q_proj", "v_proj"]}, tokens=64, completion=2,
        about="32 sequences generated at once for micro-batches of 2: the KV cache is the peak"),
    Case("c7_small_model_long", QWEN2_05B, {
        "per_device_train_batch_size": 8, "num_generations": 8, "beta": 0.04,
        "model_init_kwargs": {"dtype": "bfloat16"}},
        tokens=128, completion=4, about="a small bf16 model, reference copy, long sequences with checkpointing"),
    Case("c8_full_logits", QWEN2_05B, {
        "per_device_train_batch_size": 8, "num_generations": 8, "beta": 0.04}, tokens=64, completion=4,
        full_logits=True, about="whole logits in a subclass as older TRL had them, fp32 autocast, reference copy"),
    _plain("l1_own_adam", "an optimizer with its state in __init__, updated in place", optimizer="in_place"),
    _plain("l2_own_adam_anew", "an optimizer that makes its moments anew", optimizer="out_of_place"),
    _plain("l3_adagrad", "Adagrad, whose state is made in its __init__", optimizer="adagrad"),
    _plain("l4_tied_matmul", "a tied head by matmul", head="matmul", optimizer="foreach"),
    _plain("l5_unfrozen_reference", "an unfrozen reference copy, caches in buffers", reference="copy", new_tokens=4),
    _plain("l6_three_passes", "three passes in one backward", passes=3, optimizer="fused"),
    _plain("l7_direct_forward", "forward() called directly, caches in buffers", direct=True, new_tokens=4),
    _plain("l8_rebound", "the loss stays bound until the next step's", rebinds=True),
    # The rules were not written with these at hand; see the README.
    _plain("u1_momentum_direct", "sign descent with state in __init__, forward() called directly, tied head",
           optimizer="momentum", direct=True, head="functional"),
    _plain("u2_second_reference", "a second model as reference, caches in buffers, two passes in one backward",
           optimizer="foreach", reference="second", new_tokens=5, passes=2, head="matmul"),
    _plain("u3_adagrad_rebound", "Adagrad, the loss bound, two passes", optimizer="adagrad", rebinds=True, passes=2),
    _plain("u4_anew_reference", "moments made anew beside an unfrozen reference, tied head", optimizer="out_of_place",
           reference="copy", head="functional", direct=True, new_tokens=3),
    _plain("u5_fused_cache", "fused AdamW, caches in buffers, tied head", optimizer="fused", new_tokens=6,
           head="matmul", rebinds=True),
)}
