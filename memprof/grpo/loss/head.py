"""Let a model's forward end in log-probabilities of chosen tokens instead of logits."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from memprof.grpo.loss.chunked_loss import DEFAULT_TILE_BYTES, fused_linear_logprobs
from memprof.grpo.loss.load_balancing import LoadBalancing, RoutedTokens
from memprof.grpo.rows import Place, Row, places_of

#: ``token_gradient(place, logps, entropies)``: the loss's gradient with respect to the tokens at ``place`` in
#: ``[B, T]``, as soon as their log-probabilities (and entropies) are known.
TokenGradient = Callable[
    [Place, torch.Tensor, "torch.Tensor | None"], "tuple[torch.Tensor | None, torch.Tensor | None]"
]


#: TRL's tile has 32768 of the vocabulary's logits for each token of a completion (up to 4096 tokens): no more than
#: three quarters of that.
_TILE_BYTES_A_TOKEN = 4 * 24576


@dataclass(frozen=True)
class Head:
    """Hold how hidden states become log-probabilities, as in ``trl.trainer.utils.add_fused_lm_head``.

    ``chunk_tokens``: tokens projected at a time; None: as many as a tile holds that is small beside the weights
    (``small_bytes``) or beside the longest row's logits.
    """

    temperature: float
    softcap: float | None
    logit_scale: float
    fp32: bool
    chunk_tokens: int | None = None
    small_bytes: int = DEFAULT_TILE_BYTES

    @classmethod
    def of(
        cls,
        model: Any,
        temperature: float,
        fp32: bool,
        chunk_tokens: int | None = None,
        small_bytes: int = DEFAULT_TILE_BYTES,
    ) -> Head:
        """Describe the head of a causal language model, by its configuration."""
        text = model.config.get_text_config()
        softcap = getattr(text, "final_logit_softcapping", None)
        return cls(temperature, softcap, _logit_scale(text), fp32, chunk_tokens, small_bytes)

    def _tile_bytes(self, rows: Sequence[Row]) -> int:
        longest = max(row.completion for row in rows)
        return min(DEFAULT_TILE_BYTES, max(self.small_bytes // 2, longest * _TILE_BYTES_A_TOKEN))

    def scored(self, model: Any, states: torch.Tensor, request: Request) -> Scored:
        """Score all rows' completions in one call; ``states`` ``[N, H]``, row after row, are what predicts their
        tokens."""
        torch.clear_autocast_cache()  # the layers' converted weights have done their part
        module = model.get_output_embeddings()
        weight, bias = _whole(module.weight), _whole(module.bias)
        places = places_of(request.rows, request.targets.device)
        quiet = torch.autocast(weight.device.type, enabled=False) if self.fp32 else nullcontext()
        states = states.to(weight.device)
        with quiet:
            found = fused_linear_logprobs(
                states.float() if self.fp32 else states,
                weight,
                bias,
                request.targets[places(0, states.shape[0])].to(weight.device),
                temperature=self.temperature,
                want_entropy=request.want_entropy,
                grad_fn=_bound(request.token_gradient, places),
                chunk_tokens=self.chunk_tokens,
                tile_bytes=self._tile_bytes(request.rows),
                softcap=self.softcap,
                logit_scale=self.logit_scale,
            )
        lengths = [row.completion for row in request.rows]
        entropies = [None] * len(lengths) if found.entropies is None else list(_cut(found.entropies, lengths))
        return Scored(request.rows, list(_cut(found.logps, lengths)), entropies, found.anchor)


@dataclass(frozen=True)
class Request:
    """What one forward has to compute: ``targets`` are TRL's ``completion_ids`` ``[B, T]``; ``packed``: rows end to
    end; ``balancing``: the router's auxiliary loss, where its sums are wanted."""

    head: Head
    rows: Sequence[Row]
    targets: torch.Tensor
    want_entropy: bool = True
    token_gradient: TokenGradient | None = None
    packed: bool = False
    balancing: LoadBalancing | None = None

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Pick what predicts the rows' completions, ``[N, H]``, from ``[rows, tokens, H]``, or ``[1, all, H]`` packed.

        One operation for all rows: the backward of each slice would fill a gradient of all tokens.
        """
        if len(self.rows) == 1:
            row = self.rows[0]
            return hidden[0, row.prompt - 1 : row.length - 1]
        chosen, first = [], 0
        for row in self.rows:
            chosen.append(torch.arange(first + row.prompt - 1, first + row.length - 1))
            first += row.length if self.packed else hidden.shape[1]
        return hidden.reshape(-1, hidden.shape[-1]).index_select(0, torch.cat(chosen).to(hidden.device))

    def routed(self, found: Any) -> RoutedTokens | None:
        """Add up what the router did with the rows' tokens, padding left out, in the body's output ``found``."""
        if self.balancing is None:
            return None
        width, real = found.last_hidden_state.shape[1], None
        if not self.packed and any(row.length < width for row in self.rows):
            real = torch.cat([torch.arange(row.length) + place * width for place, row in enumerate(self.rows)])
        return self.balancing.routed(found.router_logits, real)


@dataclass(frozen=True)
class Scored:
    """Per row: log-probabilities ``[completion]`` and entropies or None; with ``token_gradient`` all rows' anchor;
    ``routed``: what the router did with all rows' tokens, prompts too, where that was asked for."""

    rows: Sequence[Row]
    logps: list[torch.Tensor]
    entropies: Sequence[torch.Tensor | None]
    anchor: torch.Tensor | None
    routed: RoutedTokens | None = None


def add_lean_head(model: Any) -> None:
    """Give ``model`` (a causal LM, not PEFT's wrapper) a forward that takes ``lean=Request(...)`` and is unchanged
    without it.

    The result is a plain dict of lists of tensors: DDP looks for tensors in what a forward returns.
    """
    inner = model.forward

    @functools.wraps(type(model).forward)  # `generate` checks its arguments against the signature
    def forward(self: Any, *args: Any, lean: Request | None = None, **kwargs: Any) -> Any:
        if lean is None:
            return inner(*args, **kwargs)
        given = {name: value for name, value in kwargs.items() if value is not None}
        given["use_cache"] = False
        if lean.balancing is not None:
            given["output_router_logits"] = True
        found = self.base_model(*args, **given)
        routed = lean.routed(found)
        hidden = found.last_hidden_state
        del found  # router logits of all layers
        scored = lean.head.scored(self, lean.states(hidden), lean)
        return {"logps": scored.logps, "entropies": scored.entropies, "anchor": scored.anchor, "routed": routed}

    model.forward = types.MethodType(forward, model)


def _bound(token_gradient: TokenGradient | None, places: Callable[[int, int], Place]) -> Any:
    if token_gradient is None:
        return None
    return lambda logps, entropies, start, stop: token_gradient(places(start, stop), logps, entropies)


def _cut(values: torch.Tensor, lengths: list[int]) -> Sequence[torch.Tensor]:
    return [values] if len(lengths) == 1 else torch.split(values, lengths)


def _whole(tensor: Any) -> Any:
    """Gather a tensor that FSDP2 has sharded (a DTensor): one gather serves every product."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _logit_scale(text: Any) -> float:
    """Find the factor of a model's logits: each family has its own name for it."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        scale = getattr(text, name, None)
        if scale is not None:
            return float(scale)
    scaling = getattr(text, "logits_scaling", None)
    if scaling is None:
        return 1.0
    return float(scaling) if text.model_type == "hyperclovax" else 1 / float(scaling)
