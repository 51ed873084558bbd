"""Run pieces through the model: log-probabilities and entropies of completions, with a graph or without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memprof.grpo.loss.head import Request, Scored, TokenGradient
from memprof.grpo.loss.load_balancing import RoutedTokens
from memprof.grpo.micro_batch_inputs import MicroBatch
from memprof.grpo.rows import Row, row_inputs
from memprof.grpo.step.context import StepContext
from memprof.grpo.step.out_of_memory import retry_on_oom
from memprof.grpo.step.pieces import Piece, plan, segments_refused
from memprof.grpo.techniques.packing import packed_arguments
from memprof.grpo.techniques.whole_length import frequencies_of


def score_piece(
    step: StepContext,
    model: Any,
    inputs: MicroBatch,
    piece: Piece,
    *,
    want_entropy: bool = True,
    token_gradient: TokenGradient | None = None,
    may_pack: bool = True,
    balances: bool = False,
) -> Scored:
    """Run ``model`` (wrapped as it may be) forward over the rows of ``piece``.

    ``may_pack``: False where hidden states are given that are padded. ``balances``: ask the router with an auxiliary
    loss.
    """
    rows = piece.rows or [stand_in(inputs)]
    wanted = may_pack and step.settings.packing
    packed = wanted and len(rows) > 1 and piece.prompt is None and _may_pack(step, rows)
    balancing = step.balancing if balances else None
    request = Request(step.head, rows, inputs["completion_ids"], want_entropy, token_gradient, packed, balancing)
    base = step.base_model(model)
    with step.accelerator.autocast(), frequencies_of(base, inputs):
        if piece.prompt is not None:
            states = torch.cat(piece.prompt.states(base.base_model, inputs, rows))
            return step.head.scored(base, states, request)
        if packed:
            ids = packed_arguments([row_inputs(inputs, [row], 0)["input_ids"][0] for row in rows])
        else:
            ids = row_inputs(inputs, rows, step.pad_id, counts_padding=step.counts_padding)
        found = model(**ids, lean=request)
        if packed:
            ids["memprof_segments"].check()
    return Scored(rows, found["logps"], found["entropies"], found["anchor"], found["routed"])


def close_prompt(step: StepContext, model: Any, inputs: MicroBatch, piece: Piece) -> torch.Tensor:
    """Return a scalar of value 0 whose backward is the prompt's; ``piece`` is its last."""
    assert piece.prompt is not None
    base = step.base_model(model)
    with step.accelerator.autocast(), frequencies_of(base, inputs):
        return piece.prompt.close(base.base_model, inputs)


def _may_pack(step: StepContext, rows: Sequence[Row]) -> bool:
    why = segments_refused(step, rows)
    if why is not None:
        step.log.warn(f"sequences are not packed: {why}")
    return why is None


def score_without_graph(
    step: StepContext,
    model: Any,
    inputs: MicroBatch,
    rows: Sequence[Row],
    want_entropy: bool,
    *,
    balances: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, RoutedTokens | None]:
    """Return log-probabilities and entropies ``[B, T]`` of all rows, 0 where there is no token, and what the router did
    with their tokens (None unless it ``balances``)."""
    logps, entropies = blank(inputs), blank(inputs)
    pieces = plan(step, inputs, rows, graph=False, balances=balances)
    routed = score_pieces(step, model, inputs, pieces, logps, entropies, want_entropy=want_entropy, balances=balances)
    return logps, entropies, routed


@torch.no_grad()
def score_pieces(
    step: StepContext,
    model: Any,
    inputs: MicroBatch,
    pieces: Sequence[Piece],
    logps: torch.Tensor,
    entropies: torch.Tensor,
    *,
    want_entropy: bool = True,
    balances: bool = False,
) -> RoutedTokens | None:
    """Run ``pieces`` forward and write their values into ``logps`` and ``entropies`` ``[B, T]``; return what the router
    did with all their tokens (None unless it ``balances``)."""
    routed: RoutedTokens | None = None

    def run(piece: Piece) -> None:
        nonlocal routed
        scored = score_piece(step, model, inputs, piece, want_entropy=want_entropy, balances=balances)
        if piece.rows:
            write(scored, logps, entropies)
            routed = routed if scored.routed is None else scored.routed.plus(routed)

    def may_split() -> bool:
        return not (model.training and step.draws)

    for piece in pieces:
        if piece.closes and piece.prompt is not None:
            piece.prompt.prefix = None
            continue
        if step.adaptation is None:
            run(piece)
        else:
            retry_on_oom(piece, run, (), {}, step.adaptation, logps.device, splits=may_split)
    return routed


def stand_in(inputs: MicroBatch) -> Row:
    """Make a row of two tokens for a rank that has no piece left while others have: its result is not used."""
    width = inputs["prompt_ids"].shape[1]
    return Row(0, width - 1, 1, 1)


def blank(inputs: MicroBatch) -> torch.Tensor:
    """Return zeros ``[B, T]`` fp32."""
    ids = inputs["completion_ids"]
    return torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)


def write(scored: Scored, logps: torch.Tensor, entropies: torch.Tensor) -> None:
    """Put a piece's values at their places in ``[B, T]``."""
    for row, found, entropy in zip(scored.rows, scored.logps, scored.entropies, strict=True):
        logps[row.index, : row.completion] = found.detach()
        if entropy is not None:
            entropies[row.index, : row.completion] = entropy.detach()
