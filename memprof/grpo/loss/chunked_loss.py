"""The chunked loss: log-probabilities of target tokens from hidden states, with the logits of a few tokens at a time.

The head's product ``hidden @ weight.T`` is ``[N, V]``: at 20,480 tokens and a vocabulary of 128,256 that is 5.3 GB in
bf16, and a loss keeps several of its size. Here a chunk of tokens is projected over the whole vocabulary into one
buffer, read once, and forgotten; where gradients are wanted the same buffer is overwritten with the gradient of the
logits and multiplied back. Because a chunk has its whole vocabulary, its softmax is complete at once, so that

- without ``grad_fn`` the forward keeps the logsumexp alone, and the backward projects each chunk again
  (3 products with a frozen head, 4 with a trainable one, as TRL's chunked path does);
- with ``grad_fn``, which tells the loss's gradient with respect to a chunk's log-probabilities as soon as they are
  known, everything happens in the forward (2 and 3 products).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from memprof.grpo.loss.fused_tiles import Transform
from memprof.grpo.loss.passes import Passes, passes_for
from memprof.grpo.rows import parts_of

#: ``grad_fn(logps, entropies, start, stop) -> (dlogps, dentropies)``: the gradient of the loss with respect to the
#: log-probabilities (and entropies) of tokens ``start:stop``; either may be None.
GradFn = Callable[[torch.Tensor, "torch.Tensor | None", int, int], "tuple[torch.Tensor | None, torch.Tensor | None]"]

DEFAULT_TILE_BYTES = 256 << 20
#: vocabulary rows of the head that are converted at a time where its dtype is not the products'.
_CONVERTED_ROWS = 32768


class LinearLogprobs(NamedTuple):
    """``logps`` ``[N]`` fp32; ``entropies`` ``[N]`` fp32 in nats, or None. ``anchor``: with ``grad_fn``, a scalar of
    value 0 whose ``backward()`` sends the gradient already computed on to ``hidden`` (and the head), multiplied by the
    gradient it is given; the log-probabilities are then constants."""

    logps: torch.Tensor
    entropies: torch.Tensor | None
    anchor: torch.Tensor | None


def chunk_size(n_tokens: int, vocabulary: int, tile_bytes: int = DEFAULT_TILE_BYTES) -> int:
    """Choose a chunk's tokens: its logits take at most ``tile_bytes`` in fp32, and chunks are of nearly equal size."""
    most = max(1, tile_bytes // (4 * vocabulary))
    if most >= 128:
        most -= most % 64
    if n_tokens <= most:
        return max(1, n_tokens)
    chunks = -(-n_tokens // most)
    even = -(-n_tokens // chunks)
    return min(most, -(-even // 16) * 16)


def fused_linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    want_entropy: bool = False,
    grad_fn: GradFn | None = None,
    chunk_tokens: int | None = None,
    tile_bytes: int = DEFAULT_TILE_BYTES,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    weight_grad: torch.Tensor | None = None,
) -> LinearLogprobs:
    """Compute each target's log-probability: ``log_softmax(cap(scale * (hidden @ weight.T + bias)) / temperature)``.

    Args:
        hidden: ``[N, H]``, the outputs of the model's body that predict ``targets``.
        weight: ``[V, H]`` the head; ``bias``: ``[V]`` or None.
        targets: ``[N]`` int64, each in ``0..V-1``.
        want_entropy: return the entropies too (differentiable without ``grad_fn``).
        grad_fn: see :data:`GradFn`. The gradient is then computed in the forward, and ``anchor.backward()`` applies
            it. The products run in the forward even if nobody calls that.
        chunk_tokens: tokens to a chunk; None: as many as fit ``tile_bytes`` in fp32.
        softcap: ``cap(x) = softcap * tanh(x / softcap)`` (Gemma); ``logit_scale``: multiplies the logits first
            (Cohere; Granite's is ``1 / logits_scaling``).
        weight_grad: an fp32 ``[V, H]`` sum that the head's gradient is added to, over any number of calls; autograd
            then gets none for ``weight``. What ``anchor.backward()`` multiplies by does not reach it.

    Under autocast the products run in its dtype, otherwise in ``hidden``'s. Log-probabilities, entropies and all sums
    are fp32; no gradient is rounded before it is complete. Memory: one tile ``chunk x V`` in the products' dtype (on a
    GPU without Triton 64 MiB more), ``[N, H]`` for the hidden states' gradient, ``[V, H]`` fp32 for a trainable head,
    and where the head has another dtype than the products, a copy in theirs.

    Raises:
        ValueError: shapes that do not belong together, a temperature that is not positive.
    """
    _check(hidden, weight, bias, targets, temperature, chunk_tokens, weight_grad)
    if chunk_tokens is None:
        chunk_tokens = chunk_size(hidden.shape[0], weight.shape[0], tile_bytes)
    kind = hidden.device.type
    plan = _Plan(
        chunk=min(chunk_tokens, max(1, hidden.shape[0])),
        dtype=torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype,
        transform=Transform(logit_scale, softcap, 1 / temperature),
        want_entropy=want_entropy,
        recording=torch.is_grad_enabled(),
    )
    outputs = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, plan, grad_fn, weight_grad
    )
    return LinearLogprobs(*outputs)


class _Plan(NamedTuple):
    chunk: int
    dtype: torch.dtype
    transform: Transform
    want_entropy: bool
    recording: bool


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    chunk_tokens: int | None,
    weight_grad: torch.Tensor | None,
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden is [N, H] and weight [V, H]: got {list(hidden.shape)} and {list(weight.shape)}.")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"One target a token: {hidden.shape[0]} hidden states, targets {list(targets.shape)}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias is [V]: got {list(bias.shape)} for a head of {list(weight.shape)}.")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive: got {temperature}.")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1: got {chunk_tokens}.")
    if weight_grad is not None and (weight_grad.shape != weight.shape or weight_grad.dtype != torch.float32):
        raise ValueError(
            f"weight_grad is fp32 {list(weight.shape)}: got {weight_grad.dtype} {list(weight_grad.shape)}."
        )


class _LinearLogprobs(torch.autograd.Function):
    """Forward and backward over chunks; see the module's text for what is kept between the two."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        plan: _Plan,
        grad_fn: GradFn | None,
        weight_grad: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        ctx.set_materialize_grads(False)
        n = hidden.shape[0]
        logps = torch.empty(n, dtype=torch.float32, device=hidden.device)
        lse = torch.empty_like(logps)
        entropies = torch.empty_like(logps) if plan.want_entropy else None
        needs = tuple(plan.recording and need for need in ctx.needs_input_grad[:3])
        grads = _Gradients(hidden, weight, bias, needs, plan, weight_grad) if grad_fn and any(needs) else None
        passes = passes_for(hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            head = weight if grads is None and n <= plan.chunk else weight.to(plan.dtype)
            for rows, tile, h in _tiles(hidden, head, bias, plan):
                found = passes.stats(tile, targets[rows], plan.transform, plan.want_entropy)
                logps[rows], lse[rows] = found[0], found[1]
                if entropies is not None and found[2] is not None:
                    entropies[rows] = found[2]
                if grads is not None and grad_fn is not None:
                    dlogps, dentropies = grad_fn(logps[rows], found[2], rows.start, rows.stop)
                    grads.add(passes, tile, h, head, rows, targets[rows], lse[rows], found[2], dlogps, dentropies)
        ctx.plan, ctx.weight_grad = plan, weight_grad
        if grad_fn is None:
            ctx.computed = None
            ctx.save_for_backward(hidden, weight, bias, targets, lse, entropies)
            return logps, entropies, None
        ctx.computed = grads.take() if grads is not None else (None, None, None)
        ctx.mark_non_differentiable(*(x for x in (logps, entropies) if x is not None))
        return logps, entropies, torch.zeros((), dtype=torch.float32, device=hidden.device)

    @staticmethod
    def backward(
        ctx: Any, dlogps: torch.Tensor | None, dentropies: torch.Tensor | None, danchor: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if ctx.computed is not None:
            computed, ctx.computed = ctx.computed, ()
            if not computed:
                raise RuntimeError("The gradient of these log-probabilities was computed once and has been used.")
            if danchor is None:
                return (None,) * 7
            return (*(None if g is None else g.mul_(danchor) for g in computed), None, None, None, None)
        hidden, weight, bias, targets, lse, entropies = ctx.saved_tensors
        if dlogps is None and dentropies is None:
            return (None,) * 7
        plan: _Plan = ctx.plan
        grads = _Gradients(hidden, weight, bias, ctx.needs_input_grad[:3], plan, ctx.weight_grad)
        passes = passes_for(hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            head = weight.to(plan.dtype)
            for rows, tile, h in _tiles(hidden, head, bias, plan):
                grads.add(
                    passes, tile, h, head, rows, targets[rows], lse[rows],
                    None if entropies is None else entropies[rows],
                    None if dlogps is None else dlogps[rows],
                    None if dentropies is None else dentropies[rows],
                )  # fmt: skip
        return (*grads.take(), None, None, None, None)


def _tiles(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: _Plan
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield each chunk's rows, its product with the head in one reused buffer, and its hidden states."""
    n, vocabulary = hidden.shape[0], weight.shape[0]
    buffer = torch.empty((min(plan.chunk, n), vocabulary), dtype=plan.dtype, device=hidden.device)
    for rows in parts_of(n, plan.chunk):
        h = hidden[rows].to(plan.dtype)
        tile = buffer[: rows.stop - rows.start]
        for part, w in _head_parts(weight, plan.dtype):
            torch.mm(h, w.t(), out=tile[:, part])
        if bias is not None:
            tile += bias.to(plan.dtype)
        yield rows, tile, h


def _head_parts(weight: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the head whole, or in parts where it is still to be converted, as for a single use."""
    step = weight.shape[0] if weight.dtype == dtype else _CONVERTED_ROWS
    for start in range(0, weight.shape[0], step):
        part = slice(start, min(start + step, weight.shape[0]))
        yield part, weight[part].to(dtype)


class _Gradients:
    """The sums that tiles' gradients are added to."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        needs: tuple[bool, ...],
        plan: _Plan,
        weight_grad: torch.Tensor | None,
    ) -> None:
        self.plan = plan
        self.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        self.hidden_grad = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs[0] else None
        self.returns_weight = needs[1] and weight_grad is None
        # The first chunk writes the sum instead of adding to it: 2 GB need not be filled with zeros.
        self.fresh = self.returns_weight
        self.weight_grad = (
            torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
            if self.returns_weight
            else weight_grad if needs[1] else None
        )  # fmt: skip
        self.bias_grad = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs[2] else None

    def add(
        self,
        passes: Passes,
        tile: torch.Tensor,
        h: torch.Tensor,
        head: torch.Tensor,
        rows: slice,
        targets: torch.Tensor,
        lse: torch.Tensor,
        entropies: torch.Tensor | None,
        dlogps: torch.Tensor | None,
        dentropies: torch.Tensor | None,
    ) -> None:
        """Overwrite ``tile`` with its gradient and add its products; ``head``: the weight in the products' dtype."""
        transform = self.plan.transform
        weights = [None if d is None else d.to(torch.float32) * transform.factor for d in (dlogps, dentropies)]
        if weights[0] is None and weights[1] is None:
            weights[0] = torch.zeros_like(lse)
        passes.gradient(tile, targets, lse, entropies, *weights, transform)
        if self.hidden_grad is not None:
            self._add_hidden(passes, tile, head, self.hidden_grad[rows])
        if self.weight_grad is not None:
            passes.accumulate(self.weight_grad, tile.t(), h, first=self.fresh, fp32_products=passes.fp32_products)
            self.fresh = False
        if self.bias_grad is not None:
            self.bias_grad += tile.sum(0, dtype=torch.float32)

    def _add_hidden(self, passes: Passes, tile: torch.Tensor, head: torch.Tensor, out: torch.Tensor) -> None:
        if tile.dtype == out.dtype and not passes.fp32_products:
            torch.mm(tile, head, out=out)  # the CPU sums in fp32 and rounds once
            return
        # On CUDA a bf16 result may be summed in bf16 across a split of the vocabulary: ask for fp32.
        total = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device=out.device)
        passes.accumulate(total, tile, head, first=True, fp32_products=passes.fp32_products)
        if total is not out:
            out.copy_(total)

    def take(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return gradients for hidden, weight and bias in their own dtypes."""
        weight = self.weight_grad if self.returns_weight else None
        if weight is not None and self.fresh:
            weight.zero_()  # there was no token
        return (
            self.hidden_grad,
            None if weight is None else weight.to(self.dtypes[1]),
            None if self.bias_grad is None else self.bias_grad.to(self.dtypes[2]),
        )
