"""The prompt of a group through the model once, exactly, for all its completions.

The G completions of a GRPO group begin with the same P tokens. Their keys and values (and the last hidden state, which
predicts each completion's first token) are computed once and taken as leaves: each completion runs alone (or a few
packed in a row), attends to them, and its backward leaves gradients on them. When all are done the prompt's own
backward runs once with the sums. Tokens computed: ``P + sum(C_i - 1)`` instead of ``sum(P + C_i)``; in memory at a
time: one completion's graph, and the prompt's.

    prefix = forward_prompt(body, prompt_ids)
    for ids in completions:
        (hidden,) = forward_completions(body, prefix, [ids])     # [C, H]: row t predicts token t
        loss(hidden, ids).backward()
    prefix.backward()

Composes with :mod:`memprof.grpo.techniques.checkpointing` and :mod:`memprof.grpo.techniques.tiled_mlp`, adapters and
autocast. What would not be exact is refused by :func:`memprof.grpo.techniques.segment_attention.segment_refusal`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch

from memprof.grpo.techniques.packing import Body, packed_arguments, run_packed

__all__ = ["SharedPrefix", "forward_completions", "forward_prompt", "shared_prefix_forward"]

T = TypeVar("T")


class SharedPrefix:
    """A prompt's keys and values by layer, and its last hidden state: for the graph behind, and as leaves ahead.

    ``fp32_gradients``: sums over completions are kept in fp32, whatever the keys' dtype.
    """

    def __init__(self, length: int, *, fp32_gradients: bool = True) -> None:
        self.length = length
        self.fp32_gradients = fp32_gradients
        self._layers: dict[int, tuple[_Shared, _Shared]] = {}
        self._last: _Shared | None = None
        self._used = False

    def keep(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Called by attention, ``[1, heads, P, width]``; ignored when a checkpointed layer is recomputed later."""
        if self._last is None and not self._used:
            self._layers[layer] = (_Shared(key, self.fp32_gradients), _Shared(value, self.fp32_gradients))

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The leaves of one layer's keys and values."""
        key, value = self._layers[layer]
        return key.leaf, value.leaf

    @property
    def last_hidden(self) -> torch.Tensor:
        """``[1, H]``: predicts every completion's first token."""
        assert self._last is not None
        return self._last.leaf

    def backward(self) -> None:
        """The prompt's backward with what the completions' have left, once; nothing where nothing was left."""
        shared = [part for pair in self._layers.values() for part in pair]
        shared += [self._last] if self._last is not None else []
        roots = [(part.graph, grad) for part in shared if (grad := part.gradient()) is not None]
        self._layers, self._last, self._used = {}, None, True
        if roots:
            torch.autograd.backward([graph for graph, _ in roots], [grad for _, grad in roots])


class _Shared:
    """A tensor of the prompt's graph and the leaf that stands for it."""

    def __init__(self, graph: torch.Tensor, fp32: bool) -> None:
        self.graph = graph
        self.leaf = graph.detach().requires_grad_(graph.requires_grad)
        self._sum: torch.Tensor | None = None
        if graph.requires_grad and fp32 and graph.dtype != torch.float32:
            self.leaf.register_post_accumulate_grad_hook(self._add)  # type: ignore[no-untyped-call]

    def _add(self, leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        if self._sum is None:
            self._sum = leaf.grad.float()
        else:
            self._sum += leaf.grad
        leaf.grad = None

    def gradient(self) -> torch.Tensor | None:
        return self._sum.to(self.graph.dtype) if self._sum is not None else self.leaf.grad


def forward_prompt(body: Body, prompt_ids: torch.Tensor, *, fp32_gradients: bool = True) -> SharedPrefix:
    """Run ``prompt_ids [1, P]`` (or ``[P]``) through ``body`` and keep what completions need.

    ``body(**kwargs)`` is a transformers model without its head, or whatever calls one with the same keyword arguments,
    and returns an output with ``last_hidden_state``.
    """
    ids = prompt_ids.reshape(-1)
    prefix = SharedPrefix(ids.shape[0], fp32_gradients=fp32_gradients)
    hidden = run_packed(body, packed_arguments([ids], becomes=prefix))
    # A copy of one row, so that the other P - 1 can go.
    prefix._last = _Shared(hidden[0, -1:].clone(), fp32_gradients)
    return prefix


def forward_completions(body: Body, prefix: SharedPrefix, completions: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Hidden states ``[C_i, H]`` for each completion's ids ``[C_i]``; row t predicts token t.

    Several completions go through as one row. A completion's last token is not computed: nothing follows it.
    """
    longer = [ids[:-1] for ids in completions if ids.shape[0] > 1]
    rest: list[torch.Tensor] = []
    if longer:
        hidden = run_packed(body, packed_arguments(longer, prefix=prefix))[0]
        rest = list(hidden.split([ids.shape[0] for ids in longer]))  # type: ignore[no-untyped-call]
    following = iter(rest)
    first = prefix.last_hidden
    return [torch.cat([first, next(following)]) if ids.shape[0] > 1 else first[: ids.shape[0]] for ids in completions]


def shared_prefix_forward(
    body: Body,
    prompt_ids: torch.Tensor,
    completions: Sequence[torch.Tensor],
    piece_fn: Callable[[int, torch.Tensor], T],
    *,
    max_tokens: int | None = None,
) -> list[T]:
    """A group's forward and backward: ``piece_fn(index, hidden [C, H])`` for each completion, then the prompt's.

    Where ``piece_fn`` returns a tensor with a graph, its backward runs before the next piece's forward; what it
    returned is then given back detached. Completions are packed into rows of at most ``max_tokens`` tokens
    (None: each alone).
    Under ``torch.no_grad`` nothing is backpropagated.
    """
    prefix = forward_prompt(body, prompt_ids)
    results: list[T] = []
    for group in _groups([ids.shape[0] for ids in completions], max_tokens):
        hidden = forward_completions(body, prefix, [completions[i] for i in group])
        pieces = [piece_fn(i, h) for i, h in zip(group, hidden, strict=True)]
        losses = [p for p in pieces if isinstance(p, torch.Tensor) and p.requires_grad]
        if losses:
            torch.autograd.backward(losses)
        results += [cast(T, p.detach()) if isinstance(p, torch.Tensor) else p for p in pieces]
    prefix.backward()
    return results


def _groups(lengths: Sequence[int], max_tokens: int | None) -> list[list[int]]:
    """Neighbouring completions that fit a row together."""
    groups: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if groups and length <= room:
            groups[-1].append(index)
            room -= length
        else:
            groups.append([index])
            room = (max_tokens or 0) - length
    return groups
