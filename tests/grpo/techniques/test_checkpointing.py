"""Every kind of checkpointing against none: the same gradients, fewer bytes, and what is computed again."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from memprof.errors import UsageError  # noqa: E402
from memprof.grpo.techniques.checkpointing import CHECKPOINTING_KINDS, apply_checkpointing  # noqa: E402
from memprof.grpo.techniques.layers import decoder_layers  # noqa: E402
from tests.grpo.tiny_models import FAMILIES, assert_same, body_of, build, gradients, tokens, weighted  # noqa: E402

RECOMPUTING = [kind for kind in CHECKPOINTING_KINDS if kind != "none"]


def step(model: Any, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """Hidden states and gradients of a batch of two sequences; dropout draws from ``seed``."""
    torch.manual_seed(seed)
    ids = torch.stack([tokens(11, seed=1), tokens(11, seed=2)])
    hidden = body_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    weighted(hidden).backward()
    return hidden.detach(), gradients(model)


@pytest.mark.parametrize("kind", RECOMPUTING)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_without(family: str, kind: str) -> None:
    model = build(family)
    meant, true = step(model)
    apply_checkpointing(model, kind)
    found, mine = step(model)
    assert torch.equal(found, meant)
    assert_same(mine, true, 1e-6)


@pytest.mark.parametrize("kind", RECOMPUTING)
@pytest.mark.parametrize("autocast", [False, True])
def test_adapters_with_dropout_draw_the_same_numbers_again(kind: str, autocast: bool) -> None:
    """The embedding is frozen: the first layer's input needs no gradient. Dropout in LoRA and in attention."""
    model = build(lora=True, lora_dropout=0.3, attention_dropout=0.0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        meant, true = step(model)
        apply_checkpointing(model, kind)
        found, mine = step(model)
        other, _ = step(model, seed=5)
    assert torch.equal(found, meant)
    assert not torch.equal(found, other)
    assert_same(mine, true, 1e-6)


def operators(model: Any) -> Counter[str]:
    with _Operators() as seen:
        step(model)
    return seen.counts


class _Operators(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize(
    ("kind", "attentions", "activations"),
    [("none", 1, 1), ("mlp", 1, 2), ("selective", 1, 2), ("full", 2, 2), ("offloaded", 2, 2)],
)
def test_what_is_computed_again(kind: str, attentions: int, activations: int) -> None:
    """Calls of attention and of the MLP's activation to a layer, forward and backward together."""
    model = build(num_hidden_layers=3)
    apply_checkpointing(model, kind)
    counts = operators(model)
    assert counts[ATTENTION] == 3 * attentions
    assert counts["silu"] == 3 * activations


def test_memory_at_the_peak_falls_in_the_documented_order(tmp_path: Any) -> None:
    """The tensor trace of a real step, long enough that activations outweigh the rest."""
    import memprof

    def peak(kind: str) -> int:
        gc.collect()  # the model before
        model = build(num_hidden_layers=5)
        apply_checkpointing(model, kind)
        path = tmp_path / f"{kind}.pickle"
        with memprof.record(path, model=model):
            body_of(model)(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()
        return int(memprof.analyze(memprof.load_snapshot(path)).to_dict()["peak"]["allocated_bytes"])

    ids = tokens(200)[None]
    peaks = {kind: peak(kind) for kind in ("none", "mlp", "selective", "full")}
    attention_outputs = 4 * 200 * 32 * 4  # not all are alive at the peak
    assert peaks["full"] + attention_outputs / 2 < peaks["selective"] < peaks["mlp"] < peaks["none"]


@pytest.mark.parametrize("kind", RECOMPUTING)
def test_generation_and_reference_run_as_they_are(kind: str) -> None:
    model = build()
    before = model.generate(tokens(5)[None], max_new_tokens=4, do_sample=False)
    apply_checkpointing(model, kind)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens(8)[None])
    plain = build()
    with FlopCounterMode(display=False) as meant, torch.no_grad():
        plain(tokens(8)[None])
    assert counter.get_total_flops() == meant.get_total_flops()
    assert torch.equal(model.generate(tokens(5)[None], max_new_tokens=4, do_sample=False), before)


@pytest.mark.parametrize("kind", RECOMPUTING)
def test_can_be_taken_off_and_copied(kind: str) -> None:
    """A deep copy checkpoints its own layers, not the original's; the state dict knows nothing of it."""
    model = build()
    keys = list(model.state_dict())
    _, true = step(model)
    applied = apply_checkpointing(model, kind)
    assert list(model.state_dict()) == keys
    twin, plain = copy.deepcopy(model), build()
    with torch.no_grad():
        for p in [*twin.parameters(), *plain.parameters()]:
            p.mul_(0.5)
    assert_same(step(twin)[1], step(plain)[1], 1e-6)
    assert applied.offloader is None or applied.offloader.pool.held_bytes == 0
    applied.remove()
    assert all("forward" not in layer.__dict__ for layer in decoder_layers(model))
    assert operators(model)[ATTENTION] == 2
    assert_same(step(model)[1], true, 1e-6)


def test_transformers_own_checkpointing_is_switched_off() -> None:
    model = build()
    model.gradient_checkpointing_enable()
    apply_checkpointing(model, "selective")
    assert not model.is_activation_checkpointing
    assert operators(model)[ATTENTION] == 2


@pytest.mark.parametrize("kind", RECOMPUTING)
def test_runs_on_fake_tensors(kind: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build()
        apply_checkpointing(model, kind)
        hidden = body_of(model)(input_ids=torch.zeros(1, 16, dtype=torch.int64), use_cache=False).last_hidden_state
        hidden.sum().backward()
        assert all(p.grad is not None for p in body_of(model).parameters())


@pytest.mark.parametrize("kind", ["gemma3", "smolvlm"])
def test_a_vision_tower_with_more_layers_is_left_alone(kind: str) -> None:
    """SmolVLM 2.2B has 24 layers, and 27 in its tower: ``full`` checkpointed the tower and switched its own off."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    parts = {"text_config": {**sizes, "num_hidden_layers": 2, "vocab_size": 64, "pad_token_id": 0}}
    parts["vision_config"] = {**sizes, "num_hidden_layers": 3}
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **parts))
    assert [type(layer).__name__[-12:] for layer in decoder_layers(torch.nn.Sequential(model))] == ["DecoderLayer"] * 2


def test_mistakes_are_named() -> None:
    with pytest.raises(UsageError, match="none, mlp, selective, full, offloaded"):
        apply_checkpointing(build(), "some")
    with pytest.raises(UsageError, match=r"no list of transformers decoder layers.*: leave checkpointing at auto"):
        apply_checkpointing(torch.nn.Linear(2, 2), "full")
    eager = build()
    eager.config._attn_implementation = "eager"
    with pytest.raises(UsageError, match="attn_implementation='sdpa'"):
        apply_checkpointing(eager, "selective")


def test_a_kernel_that_is_registered_later_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn is imported when it is first needed, long after the layers were wrapped."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    runs = []

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        return torch.ops.flash_attn._flash_attn_forward(query, *(t.repeat_interleave(groups, 1) for t in (key, value)))

    model = build()
    apply_checkpointing(model, "selective")

    @torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return (query * key + value).transpose(1, 2).contiguous()

    @kernel.register_fake
    def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return query.transpose(1, 2).contiguous()

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key = ctx.saved_tensors
        back = grad.transpose(1, 2)
        return back * key, back * query, back

    kernel.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *a, **k: (attention(*a, **k), None))
    step(model)
    assert len(runs) == len(decoder_layers(model)), "each layer's attention ran once, not again in backward"
