"""Run a layer's feed-forward network a tile of tokens at a time.

Its inner width is 3 to 6 times the model's, and three tensors of it live at once: recomputing one layer of
Llama-3.1-8B at 20,480 tokens takes 1.8 GB in bf16 untiled. The network works on each token by itself, so tiles give the
same result; in backward each tile is computed again and its gradient taken before the next.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import get_device_states, set_device_states

from memprof.errors import UsageError
from memprof.grpo.rows import parts_of
from memprof.grpo.techniques.layers import Undo, decoder_layers, is_mixture_of_experts, mlp_of, replace_forward


def apply_tiled_mlp(model: nn.Module, tile_tokens: int) -> Undo:
    """Run the MLP of every decoder layer of ``model`` in tiles of at most ``tile_tokens`` tokens; return what takes it
    back.

    Works while training with gradients on; elsewhere tiles only bound the memory of the forward. UsageError for fewer
    than one token, no decoder layers, a network that :func:`why_not_tiled` names.
    """
    if tile_tokens < 1:
        raise UsageError(f"tiled_mlp is a number of tokens, at least 1: got {tile_tokens}.")
    networks = [mlp_of(layer) for layer in decoder_layers(model)]
    for network in networks:
        if why := why_not_tiled(network):
            raise UsageError(f"tiled_mlp: {type(network).__name__} {why}, which is not tiled: drop tiled_mlp.")
    # Inside a checkpoint of the network: outside, each tile would be checkpointed again.
    undo = [replace_forward(network, partial(_tiled, _tile=tile_tokens), innermost=True) for network in networks]

    def take_back() -> None:
        while undo:
            undo.pop()()

    return take_back


def why_not_tiled(network: nn.Module) -> str | None:
    """Say why a feed-forward network does not go by tiles, as what follows its name, or return None."""
    if is_mixture_of_experts(network):
        return "is a mixture of experts"
    parameters = list(inspect.signature(type(network).forward).parameters.values())[2:]
    if any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters):
        return "requires more than hidden states"  # the residual: Bloom, MPT
    return None


def _tiled(module: nn.Module, inner: Any, x: torch.Tensor, *, _tile: int) -> torch.Tensor:
    tokens = x.reshape(-1, x.shape[-1])
    if not torch.is_grad_enabled():
        if tokens.shape[0] <= _tile:
            return inner(x)  # type: ignore[no-any-return]
        return _forward(inner, tokens, _tile).view(*x.shape[:-1], -1)
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not (tokens.requires_grad or parameters):
        return _forward(inner, tokens, _tile).view(*x.shape[:-1], -1)
    holder = _Keep.apply(tokens, torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]
    run = _Run(module, inner, _tile, x.device.type)
    out = _TiledMLP.apply(tokens, holder, run, *parameters)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], -1)  # type: ignore[no-any-return]


def _forward(inner: Any, tokens: torch.Tensor, tile: int) -> torch.Tensor:
    out: torch.Tensor | None = None
    for rows in parts_of(tokens.shape[0], tile):
        part = inner(tokens[rows])
        if out is None:
            out = part.new_empty(tokens.shape[0], part.shape[-1])
        out[rows] = part
    assert out is not None
    return out


class _Run:
    """The network and the state it ran in: autocast, and random numbers where it has dropout."""

    def __init__(self, module: nn.Module, inner: Any, tile: int, device_type: str) -> None:
        self.inner, self.tile, self.device_type = inner, tile, device_type
        self.autocast = torch.is_autocast_enabled(device_type)
        self.dtype = torch.get_autocast_dtype(device_type)
        self.dropout = any(isinstance(m, nn.Dropout) and m.p > 0 and m.training for m in module.modules())
        self.random: Any = None

    def as_then(self) -> Any:
        # No cache: casts made without gradients must not be found by a later use with them.
        return torch.autocast(self.device_type, self.dtype, enabled=self.autocast, cache_enabled=False)

    def remember(self, tokens: torch.Tensor) -> None:
        if self.dropout:
            self.random = (torch.get_rng_state(), *get_device_states(tokens))

    @contextmanager
    def same_numbers(self) -> Iterator[None]:
        if self.random is None:
            yield
            return
        state, devices, states = self.random
        with torch.random.fork_rng(devices=devices, device_type=self.device_type if devices else "cuda"):
            torch.set_rng_state(state)
            if devices:
                set_device_states(devices, states, device_type=self.device_type)
            yield


class _Keep(torch.autograd.Function):
    """Save the tokens before the network runs.

    A checkpointed layer's recomputation stops at the last tensor that is saved: saved here, it stops before the
    network, which the tiles' own backward computes again anyway.
    """

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        return anchor.clone()  # `anchor` has a gradient so that there is a node to save with

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[None, None]:
        return None, None


class _TiledMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, holder: torch.Tensor, run: _Run, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.run, ctx.kept = run, holder.grad_fn
        ctx.parameters = parameters
        run.remember(tokens)
        with run.as_then():
            return _forward(run.inner, tokens.detach(), run.tile)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        run: _Run = ctx.run
        (tokens,) = ctx.kept.saved_tensors
        wants = ctx.needs_input_grad[0]
        dtokens = torch.empty_like(tokens) if wants else None
        sums: list[torch.Tensor | None] = [None] * len(ctx.parameters)
        with run.same_numbers(), run.as_then():
            for rows in parts_of(tokens.shape[0], run.tile):
                _backward_tile(run, ctx.parameters, tokens[rows], dout[rows], dtokens, rows, sums)
        grads = (None if s is None else s.to(p.dtype) for s, p in zip(sums, ctx.parameters, strict=True))
        return (dtokens, None, None, *grads)


def _backward_tile(
    run: _Run,
    parameters: tuple[torch.Tensor, ...],
    tokens: torch.Tensor,
    dout: torch.Tensor,
    dtokens: torch.Tensor | None,
    rows: slice,
    sums: list[torch.Tensor | None],
) -> None:
    leaf = tokens.detach().requires_grad_(dtokens is not None)
    with torch.enable_grad():
        out = run.inner(leaf.view_as(leaf))  # torch's FLOP counter cannot follow a leaf through autograd.grad
    targets = [*([leaf] if dtokens is not None else []), *parameters]
    grads: list[torch.Tensor | None] = list(torch.autograd.grad(out, targets, dout, allow_unused=True))
    if dtokens is not None:
        part = grads.pop(0)
        if part is None:
            dtokens[rows].zero_()
        else:
            dtokens[rows] = part
    for place, grad in enumerate(grads):
        if grad is None:
            continue
        so_far = sums[place]
        # Parts in bf16 are added in fp32: their sum should be no worse than one product's.
        sums[place] = grad.float() if so_far is None else so_far.add_(grad)
