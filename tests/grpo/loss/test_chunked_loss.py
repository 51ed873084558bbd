"""The fused log-probabilities against float64 logits written out in full, and against TRL's chunked path."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from memprof.grpo.loss import chunked_loss, passes  # noqa: E402
from memprof.grpo.loss.chunked_loss import chunk_size, fused_linear_logprobs  # noqa: E402

N, H, V = 37, 24, 301


def plain(
    hidden: Any,
    weight: Any,
    bias: Any,
    targets: Any,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Any, Any]:
    """What is meant, written out: every logit at once."""
    z = torch.nn.functional.linear(hidden, weight, bias) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    logp = torch.log_softmax(z / temperature, -1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def inputs(dtype: Any = torch.float32, *, bias: bool = False, seed: int = 0, scale: float = 1.0) -> list[Any]:
    g = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(N, H, generator=g) * scale).to(dtype).requires_grad_()
    weight = (torch.randn(V, H, generator=g) * 0.5).to(dtype).requires_grad_()
    b = torch.randn(V, generator=g).to(dtype).requires_grad_() if bias else None
    return [hidden, weight, b, torch.randint(V, (N,), generator=g)]


def doubled(tensors: list[Any]) -> list[Any]:
    return [t.detach().double().requires_grad_() if t is not None and t.is_floating_point() else t for t in tensors]


def grads(tensors: list[Any]) -> list[Any]:
    return [t.grad for t in tensors[:3] if t is not None]


def error(found: Any, true: Any) -> float:
    return float((found.detach().double() - true.detach()).norm() / true.detach().norm())


def coefficients() -> tuple[Any, Any]:
    g = torch.Generator().manual_seed(7)
    return torch.randn(N, generator=g), torch.randn(N, generator=g)


CASES = list(product([1.0, 0.7], [None, 5.0], [1.0, 0.25], [False, True]))


@pytest.mark.parametrize("in_forward", [False, True])
@pytest.mark.parametrize(("temperature", "softcap", "logit_scale", "bias"), CASES)
def test_values_and_gradients_are_those_of_the_full_logits(
    temperature: float, softcap: float | None, logit_scale: float, bias: bool, in_forward: bool
) -> None:
    mine, true = inputs(bias=bias), doubled(inputs(bias=bias))
    how: dict[str, Any] = {"temperature": temperature, "softcap": softcap, "logit_scale": logit_scale}
    a, b = coefficients()
    logps, entropies = plain(*true, **how)
    (logps @ a.double() + entropies @ b.double()).backward()

    def known(logp: Any, entropy: Any, start: int, stop: int) -> tuple[Any, Any]:
        assert logp.shape == entropy.shape == (stop - start,)
        return a[start:stop], b[start:stop]

    found = fused_linear_logprobs(
        *mine, want_entropy=True, chunk_tokens=8, grad_fn=known if in_forward else None, **how
    )
    if in_forward:
        assert found.anchor is not None
        assert not found.logps.requires_grad
        found.anchor.backward()
    else:
        (found.logps @ a + found.entropies @ b).backward()
    assert found.logps.dtype == torch.float32
    assert error(found.logps, logps) < 1e-6
    assert error(found.entropies, entropies) < 1e-6
    for mine_grad, true_grad in zip(grads(mine), grads(true), strict=True):
        assert error(mine_grad, true_grad) < 2e-6


@pytest.mark.parametrize("entropy_only", [False, True])
def test_each_output_may_be_the_only_one_with_a_gradient(entropy_only: bool) -> None:
    mine, true = inputs(), doubled(inputs())
    plain(*true)[entropy_only].sum().backward()
    found = fused_linear_logprobs(*mine, want_entropy=True, chunk_tokens=16)
    (found.entropies if entropy_only else found.logps).sum().backward()
    for mine_grad, true_grad in zip(grads(mine), grads(true), strict=True):
        assert error(mine_grad, true_grad) < 2e-6


def test_gradient_in_the_forward_may_depend_on_the_values_and_is_scaled_by_the_anchors() -> None:
    """A loss that is not linear in the log-probabilities, with the derivative its ``grad_fn`` gives."""
    mine, true = inputs(), doubled(inputs())
    (plain(*true)[0].exp() * 3).sum().backward()
    found = fused_linear_logprobs(*mine, chunk_tokens=5, grad_fn=lambda logp, _, start, stop: (logp.exp(), None))
    (found.anchor * 3).backward()
    for mine_grad, true_grad in zip(grads(mine), grads(true), strict=True):
        assert error(mine_grad, true_grad) < 2e-6


def test_gradient_computed_once_cannot_be_used_twice() -> None:
    found = fused_linear_logprobs(*inputs(), grad_fn=lambda logp, *_: (torch.ones_like(logp), None))
    found.anchor.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has been used"):
        found.anchor.backward()


def test_frozen_head_gets_no_gradient_and_costs_no_product() -> None:
    """FLOPs counted by torch: 3 products, 4 with a trainable head; 2 and 3 with the gradient in the forward."""
    product_flops = 2 * N * H * V
    for trainable, in_forward in product([False, True], [False, True]):
        mine = inputs()
        mine[1].requires_grad_(trainable)
        with FlopCounterMode(display=False) as counter:
            known = (lambda logp, *_: (torch.ones_like(logp), None)) if in_forward else None
            found = fused_linear_logprobs(*mine, chunk_tokens=8, grad_fn=known)
            (found.anchor if in_forward else found.logps.sum()).backward()
        assert counter.get_total_flops() == product_flops * (3 + trainable - in_forward)
        assert (mine[1].grad is not None) == trainable


def test_no_gradient_no_work() -> None:
    """A reference policy's log-probabilities: one product, and ``grad_fn`` is not asked."""
    mine = inputs()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        found = fused_linear_logprobs(*mine, chunk_tokens=8, grad_fn=lambda *_: pytest.fail("asked"))
    assert counter.get_total_flops() == 2 * N * H * V
    assert not found.logps.requires_grad


@pytest.mark.parametrize("in_forward", [False, True])
def test_head_gradient_can_be_summed_over_pieces_in_fp32(in_forward: bool) -> None:
    hidden, weight, _, targets = inputs(torch.bfloat16)
    total = torch.zeros(V, H)
    for start, stop in [(0, 10), (10, N)]:
        known = (lambda logp, *_: (torch.ones_like(logp), None)) if in_forward else None
        found = fused_linear_logprobs(
            hidden[start:stop], weight, None, targets[start:stop], chunk_tokens=4, grad_fn=known, weight_grad=total
        )
        (found.anchor if in_forward else found.logps.sum()).backward()
    assert weight.grad is None
    true = doubled([hidden, weight, None, targets])
    plain(*true)[0].sum().backward()
    assert error(total, true[1].grad) < 5e-3  # the tile's gradient is bf16; its sum is not rounded
    rounded = true[1].grad.bfloat16()
    assert total.dtype == torch.float32
    assert error(hidden.grad, true[0].grad) < 2 * error(rounded, true[1].grad) + 5e-3


@pytest.mark.parametrize("in_forward", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_error_is_no_larger_than_trls(autocast: bool, in_forward: bool) -> None:
    """Against float64 of the same bf16 (or, under autocast, fp32) inputs, over several draws."""
    pytest.importorskip("trl", minversion="1.16")
    from trl.kernels import ChunkedLogProbFunction

    mine_errors, trl_errors = torch.zeros(3), torch.zeros(3)
    a, _ = coefficients()
    for seed in range(6):
        dtype = torch.float32 if autocast else torch.bfloat16
        ours, trls = inputs(dtype, seed=seed), inputs(dtype, seed=seed)
        true = doubled(ours)
        truth = plain(*true, temperature=0.9)[0]
        (truth @ a.double()).backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            known = (lambda logp, _, start, stop: (a[start:stop], None)) if in_forward else None
            found = fused_linear_logprobs(*ours, temperature=0.9, chunk_tokens=16, grad_fn=known)
            theirs = ChunkedLogProbFunction.apply(*trls, 0.9, 128, None, 1.0, ())[0]
        (found.anchor if in_forward else found.logps @ a).backward()
        (theirs @ a).backward()
        for errors, logps, tensors in ((mine_errors, found.logps, ours), (trl_errors, theirs, trls)):
            pairs = [(logps, truth), *zip(grads(tensors), grads(true), strict=True)]
            errors += torch.tensor([error(*pair) for pair in pairs])
    assert (mine_errors <= trl_errors * 1.02).all(), (mine_errors, trl_errors)


def test_extreme_logits_stay_finite() -> None:
    mine = inputs(scale=200.0)
    found = fused_linear_logprobs(*mine, want_entropy=True, chunk_tokens=8)
    (found.logps.sum() + found.entropies.sum()).backward()
    assert all(torch.isfinite(x).all() for x in (found.logps, found.entropies, *grads(mine)))
    truth, entropy = plain(*doubled(inputs(scale=200.0)))
    assert error(found.logps, truth) < 1e-6
    assert (found.entropies.double() - entropy).abs().max() < 1e-3


@pytest.mark.parametrize(("dtype", "in_forward"), [(torch.float32, False), (torch.bfloat16, True)])
def test_runs_on_fake_tensors_and_never_holds_all_logits(dtype: Any, in_forward: bool) -> None:
    """Llama-3.1's head, executed without values: no tensor holds more logits than the tile."""
    n, h, v = 600, 4096, 128256
    with FakeTensorMode(), _LargestLogits() as seen:
        hidden = torch.empty(n, h, dtype=dtype, requires_grad=True)
        weight = torch.empty(v, h, dtype=dtype)
        known = (lambda logp, *_: (torch.ones_like(logp), None)) if in_forward else None
        found = fused_linear_logprobs(hidden, weight, None, torch.zeros(n, dtype=torch.int64), grad_fn=known)
        (found.anchor if in_forward else found.logps.sum()).backward()
        assert hidden.grad.shape == (n, h)
    assert seen.logits <= chunk_size(n, v) * v < 0.6 * n * v
    assert chunk_size(n, v) * v * 4 <= 256 << 20


def test_shape_passes_stand_for_a_gpus_on_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """20,480 tokens of Llama-3.1's head with a trainable fp32 gradient, in the time of a few hundred operations."""
    monkeypatch.setattr(chunked_loss, "passes_for", lambda device: passes.shape_passes())
    with FakeTensorMode(), _LargestLogits() as seen:
        hidden = torch.empty(20480, 4096, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(128256, 4096, dtype=torch.bfloat16, requires_grad=True)
        found = fused_linear_logprobs(
            hidden, weight, None, torch.zeros(20480, dtype=torch.int64), grad_fn=lambda logps, *_: (logps, None)
        )
        found.anchor.backward()
        assert hidden.grad.shape == (20480, 4096)
        assert weight.grad.dtype == torch.bfloat16
    assert seen.logits * 4 <= 256 << 20


class _LargestLogits(torch.utils._python_dispatch.TorchDispatchMode):
    """Elements of the largest tensor with a row for a token and a column for a word that any operation returned."""

    logits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.dim() == 2
                and tensor.shape[0] != 4096
                and tensor.shape[1] == 128256
            ):
                self.logits = max(self.logits, tensor.numel())
        return out


@pytest.mark.parametrize(
    ("n", "v", "most"), [(1, 10, 1 << 20), (20480, 128256, 256 << 20), (1000, 150000, 1), (0, 9, 9)]
)
def test_chunks_keep_to_their_bytes(n: int, v: int, most: int) -> None:
    chunk = chunk_size(n, v, most)
    assert 1 <= chunk <= max(1, n)
    assert chunk == 1 or chunk * v * 4 <= most


def test_no_tokens() -> None:
    hidden = torch.empty(0, H, requires_grad=True)
    weight = torch.randn(V, H, requires_grad=True)
    found = fused_linear_logprobs(hidden, weight, None, torch.empty(0, dtype=torch.int64), want_entropy=True)
    found.logps.sum().backward()
    assert found.logps.shape == (0,)
    assert hidden.grad.shape == (0, H)


def test_gradcheck_in_float64_products() -> None:
    """Autograd's own finite differences; the statistics are fp32, so the tolerance is theirs."""
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(3, 4, generator=g, requires_grad=True)
    weight = torch.randn(7, 4, generator=g, requires_grad=True)
    targets = torch.randint(7, (3,), generator=g)

    def f(h: Any, w: Any) -> Any:
        found = fused_linear_logprobs(h, w, None, targets, want_entropy=True, chunk_tokens=2)
        return found.logps, found.entropies

    assert torch.autograd.gradcheck(f, (hidden, weight), eps=1e-2, atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"weight_grad": torch.zeros(V, H, dtype=torch.bfloat16)}, "weight_grad"),
    ],
)
def test_what_cannot_be_meant_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fused_linear_logprobs(*inputs(), **change)


def test_a_gpu_without_triton_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(passes, "find_spec", lambda name: None)
    passes._say_no_triton.cache_clear()
    for _ in range(2):
        assert passes.passes_for(torch.device("cuda", 0)).name == "torch"
    assert [r.message for r in caplog.records if "Triton is not installed" in r.message].__len__() == 1
