"""A shared prompt against the same sequences one by one, each with its prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from memprof.errors import UsageError  # noqa: E402
from memprof.grpo.techniques import attention_kernels, segment_attention  # noqa: E402
from memprof.grpo.techniques.checkpointing import apply_checkpointing  # noqa: E402
from memprof.grpo.techniques.prefix import forward_completions, forward_prompt  # noqa: E402
from memprof.grpo.techniques.segment_attention import segment_refusal  # noqa: E402
from tests.grpo.tiny_models import FAMILIES, assert_same, body_of, build, gradients, tokens, weighted  # noqa: E402

PROMPT = tokens(13, seed=1)
COMPLETIONS = [tokens(n, seed=10 + n) for n in (5, 1, 8, 3)]


def unshared(model: Any) -> tuple[list[Any], dict[str, Any]]:
    """The reference: every completion with its prompt, one at a time."""
    hiddens = []
    for i, ids in enumerate(COMPLETIONS):
        row = torch.cat([PROMPT, ids])[None]
        hidden = body_of(model)(input_ids=row, use_cache=False).last_hidden_state[0]
        hiddens.append(hidden[len(PROMPT) - 1 : -1])
        weighted(hiddens[-1], i).backward()
    return [h.detach() for h in hiddens], gradients(model)


def shared_prefix_forward(body: Any, piece_fn: Callable[[int, Any], Any], max_tokens: int | None = None) -> list[Any]:
    """Run the group forward and backward: ``piece_fn(index, hidden [C, H])`` of each completion, then the prompt's.

    Neighbouring completions are packed into rows of at most ``max_tokens`` tokens (None: each alone). Under
    ``torch.no_grad`` nothing is backpropagated.
    """
    groups: list[list[int]] = []
    free = 0
    for index, ids in enumerate(COMPLETIONS):
        if groups and len(ids) <= free:
            groups[-1].append(index)
        else:
            groups.append([index])
            free = max_tokens or 0
        free -= len(ids)
    prefix = forward_prompt(body, PROMPT)
    results: list[Any] = []
    for group in groups:
        hidden = forward_completions(body, prefix, [COMPLETIONS[i] for i in group])
        pieces = [piece_fn(i, h) for i, h in zip(group, hidden, strict=True)]
        if pieces[0].requires_grad:
            torch.autograd.backward(pieces)
        results += [piece.detach() for piece in pieces]
    prefix.backward()
    return results


def shared(model: Any, max_tokens: int | None = None) -> tuple[list[Any], dict[str, Any]]:
    hiddens: list[Any] = []

    def piece(index: int, hidden: Any) -> Any:
        hiddens.append(hidden.detach())
        return weighted(hidden, index)

    shared_prefix_forward(body_of(model), piece, max_tokens)
    return hiddens, gradients(model)


@pytest.mark.parametrize("max_tokens", [None, 9])
@pytest.mark.parametrize(
    ("family", "lora"), [(f, False) for f in FAMILIES] + [(f, True) for f in FAMILIES if not f.startswith("phi")]
)
def test_hidden_states_and_gradients_are_those_of_the_sequences_alone(
    family: str, lora: bool, max_tokens: int | None
) -> None:
    model = build(family, lora=lora)
    meant, true = unshared(model)
    found, mine = shared(model, max_tokens)
    for a, b in zip(found, meant, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert_same(mine, true, 1e-5)


@pytest.mark.parametrize("kind", ["full", "selective", "mlp", "offloaded"])
@pytest.mark.parametrize("lora", [False, True])
def test_with_checkpointed_layers(kind: str, lora: bool) -> None:
    model = build(lora=lora, num_hidden_layers=3)
    _, true = unshared(model)
    apply_checkpointing(model, kind)
    _, mine = shared(model)
    assert_same(mine, true, 1e-5)


@pytest.mark.parametrize("kind", ["full", "selective", "mlp", "offloaded"])
def test_with_checkpointed_layers_where_autocast_ends_before_the_backward(kind: str) -> None:
    """As a training step has it: fp32 adapters are cast once for prompt and completions, and again in the backward."""

    def step() -> dict[str, Any]:
        with torch.autocast("cpu", torch.bfloat16):
            prefix = forward_prompt(body_of(model), PROMPT)
            hidden = forward_completions(body_of(model), prefix, COMPLETIONS)
        sum(weighted(h, i) for i, h in enumerate(hidden)).backward()
        prefix.backward()
        return gradients(model)

    model = build(lora=True, num_hidden_layers=3)
    true = step()
    apply_checkpointing(model, kind)
    assert_same(step(), true, 1e-6)


def test_bf16_error_is_no_larger_than_unshared() -> None:
    """Both against float64: gradients of all parameters, sums over completions in fp32."""
    reference = build().double()
    _, true = unshared(reference)
    model = build().to(torch.bfloat16)
    errors = []
    for _, found in (shared(model), unshared(model)):
        off = sum(float((found[n].double() - t).norm() ** 2) for n, t in true.items())
        errors.append(off**0.5)
    assert errors[0] <= errors[1] * 1.1


def test_under_autocast() -> None:
    model = build()
    with torch.autocast("cpu", torch.bfloat16):
        _, true = unshared(model)
        _, mine = shared(model)
    assert_same(mine, true, 3e-2)


def test_nothing_is_backpropagated_without_gradients() -> None:
    model = build()
    with torch.no_grad():
        hiddens = shared_prefix_forward(body_of(model), lambda _, hidden: hidden)
    assert all(not h.requires_grad for h in hiddens)
    assert not gradients(model)
    meant, _ = unshared(model)
    for a, b in zip(hiddens, meant, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_prompt_is_computed_once() -> None:
    """Tokens through the first MLP, forward only: P + sum(C - 1)."""
    model = build()
    seen = []
    body_of(model).layers[0].mlp.register_forward_hook(lambda m, args, out: seen.append(args[0].shape[1]))
    shared(model)
    assert sum(seen) == len(PROMPT) + sum(len(c) - 1 for c in COMPLETIONS)
    assert seen[0] == len(PROMPT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompt_graph_is_gone_after_its_backward(dtype: Any) -> None:
    import gc
    import weakref

    model = build().to(dtype)
    apply_checkpointing(model, "full")
    prefix = forward_prompt(body_of(model), PROMPT)
    kept = weakref.ref(prefix._layers[0][0].graph)
    gc.disable()
    try:
        (hidden,) = forward_completions(body_of(model), prefix, COMPLETIONS[:1])
        hidden.sum().backward()
        del hidden
        prefix.backward()
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("family", "changes", "longest", "reason"),
    [
        ("mistral", {"sliding_window": 16}, 17, "sliding window of 16"),
        ("gemma3_text", {"sliding_window": 16}, 17, "sliding window of 16"),
        ("gemma2", {}, 8, "capped"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, 300, "dynamic"),
        ("mistral", {"sliding_window": 16}, 16, None),
        ("qwen2", {"sliding_window": 16}, 100, None),
        ("llama", {}, 100, None),
        ("qwen3_next", {}, 100, "linear_attention"),
    ],
)
def test_what_would_not_be_exact_is_refused_by_name(
    family: str, changes: dict[str, Any], longest: int, reason: str | None
) -> None:
    config = transformers.AutoConfig.for_model(family, **{"max_position_embeddings": 256, **changes})
    config._attn_implementation = "sdpa"
    found = segment_refusal(config, longest)
    assert found is None if reason is None else reason in str(found)


def test_a_window_that_is_too_short_stops_the_call() -> None:
    model = build("mistral", sliding_window=8)
    with pytest.raises(UsageError, match="sliding window of 8"):
        forward_prompt(body_of(model), PROMPT)


def test_calls_without_segments_run_transformers_own_attention() -> None:
    model = build()
    before = model(PROMPT[None]).logits
    forward_prompt(body_of(model), PROMPT)
    assert torch.equal(model(PROMPT[None]).logits, before)


@pytest.mark.parametrize(("kernel", "dtype"), [("flash", torch.bfloat16), ("efficient", torch.float32)])
@pytest.mark.parametrize("width", [8, 12])
def test_the_gpu_kernels_are_called_as_their_operators_want(
    kernel: str, dtype: Any, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On fake tensors: arguments, shapes and gradients of CUDA's operators, which do not run here."""
    forward, backward = (getattr(attention_kernels, f"_{kernel}_{way}") for way in ("forward", "backward"))
    chosen = attention_kernels.AttentionKernel(forward, backward)
    monkeypatch.setattr(segment_attention, "attention_kernel", lambda query: chosen)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build(head_dim=width, dtype=dtype)
        prefix = forward_prompt(body_of(model), torch.zeros(40, dtype=torch.int64))
        hidden = forward_completions(body_of(model), prefix, [torch.zeros(n, dtype=torch.int64) for n in (9, 5)])
        torch.cat(hidden).sum().backward()
        prefix.backward()
        assert [tuple(h.shape) for h in hidden] == [(9, 32), (5, 32)]
        assert all(p.grad.shape == p.shape for p in body_of(model).parameters())


def test_the_gpu_kernel_follows_dtype_and_width() -> None:
    kernels = {
        (torch.bfloat16, 128): attention_kernels._flash_forward,
        (torch.float32, 128): attention_kernels._efficient_forward,
        (torch.bfloat16, 512): attention_kernels._efficient_forward,
    }
    for (dtype, width), meant in kernels.items():
        query = torch.empty(1, 2, 3, width, dtype=dtype, device="meta")
        assert attention_kernels.attention_kernel(query).forward is meant
