"""Tiny random models of several families, and what their gradients are compared by."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3", "phi")
VOCABULARY = 97
#: What DeepSeek-V3 has beside the other families.
MLA: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip


def build(
    family: str = "llama",
    *,
    seed: int = 0,
    lora: bool = False,
    lora_dropout: float = 0.0,
    dtype: Any = None,
    **changes: Any,
) -> Any:
    """A causal LM of two layers in training mode; with ``lora``, PEFT around it and adapters that do something."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family in ("qwen3", "gemma3_text", "llama"):
        settings["head_dim"] = 8
    config = transformers.AutoConfig.for_model(family, **{**settings, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", dtype=dtype or torch.float32
    )
    if lora:
        peft = pytest.importorskip("peft")
        targets = ["q_proj", "v_proj", "down_proj"]
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=targets, lora_dropout=lora_dropout, init_lora_weights=False)
        )
    return model.train()


def without_weights(family: str, **changes: Any) -> Any:
    """A causal LM of a family that need not know torch's fused attention, on the meta device."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(family, **sizes, **changes)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def body_of(model: Any) -> Any:
    """The transformers model without its head, adapters inside."""
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).base_model


def tokens(n: int, *, seed: int = 0) -> Any:
    return torch.randint(3, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))


def weighted(hidden: Any, seed: int = 0) -> Any:
    """A loss that every hidden state has its own part in."""
    return (hidden * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(seed))).sum()


def gradients(model: Any) -> dict[str, Any]:
    """Gradients by name, taken off the model."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(found: dict[str, Any], meant: dict[str, Any], tolerance: float) -> None:
    """``||a - b|| <= tolerance ||b||`` for every tensor."""
    assert found.keys() == meant.keys()
    assert meant
    for name, true in meant.items():
        assert torch.isfinite(found[name]).all()
        assert float((found[name] - true).norm()) <= tolerance * float(true.norm()) + 1e-9, name
