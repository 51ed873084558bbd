"""Let a model's forward end in log-probabilities of chosen tokens instead of logits."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from memprof.grpo.loss.fused_loss import fused_linear_logprobs
from memprof.grpo.rows import Row

__all__ = ["Head", "RowGradient", "Scored", "add_lean_head"]

#: ``row_gradient(row, logps, entropies, start, stop)``: the loss's gradient with respect to tokens ``start:stop`` of a
#: row's completion, as soon as their log-probabilities are known.
RowGradient = Callable[[Row, torch.Tensor, torch.Tensor, int, int], "tuple[torch.Tensor | None, torch.Tensor | None]"]


@dataclass(frozen=True)
class Head:
    """How hidden states become log-probabilities: as ``trl.trainer.utils.add_fused_lm_head`` does, row by row.

    ``chunk_tokens``: tokens projected at a time, None for what fits the default tile.
    """

    temperature: float
    softcap: float | None
    logit_scale: float
    fp32: bool
    chunk_tokens: int | None = None

    @classmethod
    def of(cls, model: Any, temperature: float, fp32: bool, chunk_tokens: int | None = None) -> Head:
        """Describe the head of a causal language model, by its configuration."""
        text = model.config.get_text_config()
        return cls(temperature, getattr(text, "final_logit_softcapping", None), _logit_scale(text), fp32, chunk_tokens)

    def scored(self, model: Any, states: Sequence[torch.Tensor], request: Request) -> Scored:
        """Score the rows' completions; ``states[i]`` ``[completion, H]`` are what predicts row i's tokens."""
        module = model.get_output_embeddings()
        weight, bias = _whole(module.weight), _whole(module.bias)
        quiet = torch.autocast(weight.device.type, enabled=False) if self.fp32 else nullcontext()
        logps, entropies, anchors = [], [], []
        with quiet:
            for hidden, row in zip(states, request.rows, strict=True):
                hidden = hidden.to(weight.device)
                found = fused_linear_logprobs(
                    hidden.float() if self.fp32 else hidden,
                    weight,
                    bias,
                    request.targets[row.index, : row.completion].to(weight.device),
                    temperature=self.temperature,
                    want_entropy=request.want_entropy,
                    grad_fn=_bound(request.row_gradient, row),
                    chunk_tokens=self.chunk_tokens,
                    softcap=self.softcap,
                    logit_scale=self.logit_scale,
                )
                logps.append(found.logps)
                entropies.append(found.entropies)
                anchors.append(found.anchor)
        return Scored(request.rows, logps, entropies, anchors)


@dataclass(frozen=True)
class Request:
    """What is asked of one forward. ``targets``: TRL's ``completion_ids`` ``[B, T]``; ``packed``: rows end to end."""

    head: Head
    rows: Sequence[Row]
    targets: torch.Tensor
    want_entropy: bool = True
    row_gradient: RowGradient | None = None
    packed: bool = False

    def states(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Cut out what predicts each row's completion from states ``[rows, tokens, H]``, or ``[1, all, H]`` packed."""
        parts: Any = torch.split(hidden[0], [row.length for row in self.rows]) if self.packed else hidden
        return [parts[place][row.prompt - 1 : row.length - 1] for place, row in enumerate(self.rows)]


@dataclass(frozen=True)
class Scored:
    """Per row: log-probabilities ``[completion]``, entropies or None, and with ``row_gradient`` an anchor or None."""

    rows: Sequence[Row]
    logps: list[torch.Tensor]
    entropies: list[torch.Tensor | None]
    anchors: list[torch.Tensor | None]


def add_lean_head(model: Any) -> None:
    """Give ``model`` (a causal LM, not PEFT's wrapper) a forward that takes ``lean=Request(...)``.

    Without it the forward is the one it had, so generation and TRL's own path are unchanged. The result is a plain
    dict of lists of tensors: DDP looks for tensors in what a forward returns.
    """
    inner = model.forward

    @functools.wraps(type(model).forward)  # `generate` checks its arguments against the signature
    def forward(self: Any, *args: Any, lean: Request | None = None, **kwargs: Any) -> Any:
        if lean is None:
            return inner(*args, **kwargs)
        given = {name: value for name, value in kwargs.items() if value is not None}
        given["use_cache"] = False
        hidden = self.base_model(*args, **given).last_hidden_state
        scored = lean.head.scored(self, lean.states(hidden), lean)
        return {"logps": scored.logps, "entropies": scored.entropies, "anchors": scored.anchors}

    model.forward = types.MethodType(forward, model)


def _bound(row_gradient: RowGradient | None, row: Row) -> Any:
    if row_gradient is None:
        return None
    return lambda logps, entropies, start, stop: row_gradient(row, logps, entropies, start, stop)


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
