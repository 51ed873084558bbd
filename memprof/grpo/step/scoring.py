"""Pieces through the model: log-probabilities and entropies of completions, with a graph or without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memprof.grpo.loss.head import Request, RowGradient, Scored
from memprof.grpo.step.groups import Piece, plan, segments_refused
from memprof.grpo.step.trim import Row, row_inputs
from memprof.grpo.techniques.packing import packed_arguments

__all__ = ["blank", "score_piece", "score_pieces", "score_without_graph", "stand_in", "write"]


def score_piece(
    trainer: Any,
    model: Any,
    inputs: Mapping[str, Any],
    piece: Piece,
    *,
    want_entropy: bool = True,
    row_gradient: RowGradient | None = None,
) -> Scored:
    """One forward of ``model`` (wrapped as it may be) over the rows of ``piece``."""
    rows = piece.rows or [stand_in(inputs)]
    packed = trainer.args.packing and len(rows) > 1 and piece.prompt is None and _may_pack(trainer, rows)
    request = Request(trainer._lean_head, rows, inputs["completion_ids"], want_entropy, row_gradient, packed)
    with trainer.accelerator.autocast():
        if piece.prompt is not None:
            base = trainer._base_model(model)
            states = piece.prompt.states(base.base_model, inputs, rows)
            scored: Scored = trainer._lean_head.scored(base, states, request)
            return scored
        if packed:
            ids = packed_arguments([row_inputs(inputs, [row], 0)["input_ids"][0] for row in rows])
        else:
            ids = row_inputs(inputs, rows, trainer._tokenizer.pad_token_id, counts_padding=trainer._counts_padding)
        found = model(**ids, lean=request)
        if packed:
            ids["memprof_segments"].check()
    return Scored(rows, found["logps"], found["entropies"], found["anchors"])


def _may_pack(trainer: Any, rows: Sequence[Row]) -> bool:
    why = segments_refused(trainer, rows)
    if why is not None:
        trainer._warn(f"sequences are not packed: {why}")
    return why is None


def score_without_graph(
    trainer: Any, model: Any, inputs: Mapping[str, Any], rows: Sequence[Row], want_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies ``[B, T]`` of all rows, 0 where there is no token."""
    logps, entropies = blank(inputs), blank(inputs)
    score_pieces(trainer, model, inputs, plan(trainer, inputs, rows), logps, entropies, want_entropy=want_entropy)
    return logps, entropies


@torch.no_grad()
def score_pieces(
    trainer: Any,
    model: Any,
    inputs: Mapping[str, Any],
    pieces: Sequence[Piece],
    logps: torch.Tensor,
    entropies: torch.Tensor,
    *,
    want_entropy: bool = True,
) -> None:
    """Forward of ``pieces``, their values written into ``logps`` and ``entropies`` ``[B, T]``."""
    for piece in pieces:
        if piece.closes and piece.prompt is not None:
            piece.prompt.prefix = None
            continue
        scored = score_piece(trainer, model, inputs, piece, want_entropy=want_entropy)
        if piece.rows:
            write(scored, logps, entropies)


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
