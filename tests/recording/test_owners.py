"""Owner rows: by storage, by role, once."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

from memprof.recording.kv_caches import CacheWatch
from memprof.recording.owners import OwnershipRegistry, storages_of


def book() -> OwnershipRegistry:
    return OwnershipRegistry(count(1).__next__, lambda kind: kind == "cpu")


def bytes_by_category(owners: OwnershipRegistry, tensors: list[torch.Tensor]) -> dict[str, int]:
    """Bytes of ``tensors`` under the categories their addresses were claimed for."""
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    found: Counter[str] = Counter()
    for address, _, category, *_ in owners.rows():
        found[category] += sizes.get(address, 0)
    return dict(found)


def test_tied_weights_and_views_once_and_buffers_too() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("mask", torch.ones(6))
            self.register_buffer("part", self.mask[2:])

    model, owners = Tied(), book()
    owners.add_model(model, "policy")
    owners.claim_models()
    owners.claim_models()
    assert [(row[2], row[4]) for row in owners.rows()] == [("weights", "embed.weight"), ("weights", "mask")]


def test_roles() -> None:
    owners = book()
    models = {role: nn.Linear(2, 2, bias=False) for role in ("policy", "reference", "reward", "value", "engine")}
    for role, model in models.items():
        owners.add_model(model, role)
    owners.claim_models()
    assert [row[2] for row in owners.rows()] == [
        "weights", "reference_model", "reward_model", "value_model", "inference_engine"
    ]  # fmt: skip


def test_adapters_of_a_peft_model_and_what_they_leave_frozen() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False)  # fmt: skip
    model = get_peft_model(
        LlamaForCausalLM(config), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    )
    model.add_adapter("ref", LoraConfig(r=2, target_modules=["q_proj"]))
    owners = book()
    owners.add_model(model, "policy")
    owners.claim_models()
    rows = {row[4]: row[2] for row in owners.rows()}
    by_end = {name.removeprefix("base_model.model."): category for name, category in rows.items()}
    assert by_end["model.layers.0.self_attn.q_proj.lora_A.default.weight"] == "adapters"
    assert by_end["model.layers.0.self_attn.q_proj.lora_A.ref.weight"] == "reference_model"
    assert by_end["lm_head.modules_to_save.default.weight"] == "adapters"
    assert by_end["lm_head.original_module.weight"] == "weights"
    assert by_end["model.layers.0.self_attn.q_proj.base_layer.weight"] == "weights"
    assert by_end["model.rotary_emb.inv_freq"] == "weights"


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}, {"amsgrad": True}])
def test_gradients_and_optimizer_state(options: dict[str, bool]) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    owners = book()
    owners.add_model(model, "policy")
    owners.add_optimizer(optimizer)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    owners.claim_gradients()
    owners.claim_optimizers()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    state = [t for slots in optimizer.state.values() for t in slots.values()]
    assert bytes_by_category(owners, grads + state) == {
        "gradients": sum(g.nbytes for g in grads),
        "optimizer_state": sum(t.nbytes for t in state),
    }


def test_a_wrapped_optimizer_is_looked_through() -> None:
    from memprof.recording.owners import unwrap_optimizer

    inner = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)

    class Wrapper:
        def __init__(self) -> None:
            self.optimizer = inner

    assert unwrap_optimizer(Wrapper()) is inner
    assert unwrap_optimizer(inner) is inner
    assert unwrap_optimizer(object()) is None


def test_an_address_used_again_is_claimed_again() -> None:
    owners = book()
    rows = []
    for _ in range(3):
        tensor = torch.ones(1000)
        owners.claim_inputs({"ids": tensor, "nested": [{"deep": tensor[1:]}]})
        rows.append(tensor.untyped_storage().data_ptr())
        del tensor
    assert [row[0] for row in owners.rows()] == rows
    assert [row[4] for row in owners.rows()] == ["batch.ids"] * 3


def test_other_devices_empty_and_meta_tensors_are_no_rows() -> None:
    owners = book()
    owners.claim_inputs([torch.empty(0), torch.empty(5, device="meta"), torch.ones(2).to_sparse()])
    assert owners.rows() == []
    elsewhere = OwnershipRegistry(count(1).__next__, lambda kind: kind == "cuda")
    elsewhere.claim_inputs(torch.ones(3))
    assert elsewhere.rows() == []


def test_storages_inside_a_wrapper_subclass() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    a, b = torch.ones(4), torch.zeros(4)
    found = [s.data_ptr() for s in storages_of(TwoTensor(a, b))]
    assert found == [a.data_ptr(), b.data_ptr()]


def test_a_packed_weights_scales_belong_to_it() -> None:
    class QuantState:
        def __init__(self) -> None:
            self.absmax, self.code = torch.ones(8), torch.ones(16)
            self.state2: Any = None

    model = nn.Linear(4, 4, bias=False)
    model.weight.quant_state = QuantState()  # type: ignore[attr-defined]
    owners = book()
    owners.add_model(model, "policy")
    owners.claim_models()
    assert sorted(row[4] for row in owners.rows()) == ["weight", *["weight (quantisation state)"] * 2]


def test_caches_are_owned_while_watched_and_only_without_gradients() -> None:
    from transformers import DynamicCache, LlamaConfig, StaticCache

    owners, tokens = book(), []
    watch = CacheWatch(owners, lambda new: tokens.append(new) is None)
    watch.start()
    try:
        cache = DynamicCache()
        with torch.no_grad():
            cache.update(torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4), 0)
            cache.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 0)
            config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, hidden_size=8)
            static = StaticCache(config=config, max_cache_len=9)
            static.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 0)
        assert tokens == [5, 1, 1]
        assert [(r[2], r[3], r[4]) for r in owners.rows()] == [
            ("kv_cache", part, f"layers.0.{part}") for part in ("keys", "values") * 3
        ]
        live = [cache.layers[0].keys, cache.layers[0].values, static.layers[0].keys]
        assert {t.untyped_storage().data_ptr() for t in live} <= {r[0] for r in owners.rows()}
        with torch.enable_grad():
            DynamicCache().update(torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4), 0)
        assert len(owners.rows()) == 6
    finally:
        watch.stop()
    with torch.no_grad():
        DynamicCache().update(torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4), 0)
    assert len(owners.rows()) == 6
