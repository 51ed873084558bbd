"""Pieces through the model: log-probabilities and entropies of completions, with a graph or without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memprof.grpo.head import Request, RowGradient, Scored
from memprof.grpo.split import pieces_of
from memprof.grpo.trim import Row, row_inputs

__all__ = ["blank", "score_piece", "score_without_graph", "write"]


def score_piece(
    trainer: Any,
    model: Any,
    inputs: Mapping[str, Any],
    piece: Sequence[Row],
    *,
    want_entropy: bool = True,
    row_gradient: RowGradient | None = None,
) -> Scored:
    """One forward of ``model`` (wrapped as it may be) over the rows of ``piece``."""
    ids = row_inputs(inputs["prompt_ids"], inputs["completion_ids"], piece, trainer._tokenizer.pad_token_id)
    request = Request(trainer._lean_head, piece, inputs["completion_ids"], want_entropy, row_gradient)
    with trainer.accelerator.autocast():
        found = model(**ids, lean=request)
    return Scored(piece, found["logps"], found["entropies"], found["anchors"])


def score_without_graph(
    trainer: Any, model: Any, inputs: Mapping[str, Any], rows: Sequence[Row], want_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies ``[B, T]`` of all rows, 0 where there is no token."""
    logps, entropies = blank(inputs), blank(inputs)
    pieces = trainer._same_count(pieces_of([row for row in rows if row.completion], trainer.args.max_tokens_per_piece))
    with torch.no_grad():
        for piece in pieces:
            scored = score_piece(trainer, model, inputs, piece or [stand_in(inputs)], want_entropy=want_entropy)
            if piece:
                write(scored, logps, entropies)
    return logps, entropies


def stand_in(inputs: Mapping[str, Any]) -> Row:
    """A row of two tokens for a rank that has no piece left while others have: what it computes is not used."""
    width = inputs["prompt_ids"].shape[1]
    return Row(0, width - 1, 1, 1)


def blank(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Zeros ``[B, T]`` fp32."""
    ids = inputs["completion_ids"]
    return torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)


def write(scored: Scored, logps: torch.Tensor, entropies: torch.Tensor) -> None:
    """Put a piece's values at their places in ``[B, T]``."""
    for row, found, entropy in zip(scored.rows, scored.logps, scored.entropies, strict=True):
        logps[row.index, : row.completion] = found.detach()
        if entropy is not None:
            entropies[row.index, : row.completion] = entropy.detach()
