"""Pieces of a micro-batch: what goes through the model together, and what completions of one prompt share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memprof.grpo.step.trim import Row, is_fake
from memprof.grpo.techniques.prefix import SharedPrefix, forward_completions, forward_prompt
from memprof.grpo.techniques.segment_attention import segment_refusal

__all__ = [
    "DEFAULT_PIECE_TOKENS",
    "Piece",
    "Prompt",
    "parts_of",
    "pieces_of",
    "plan",
    "segments_refused",
]

#: Rows shorter than this share a piece where nothing else is said: below it a GPU is not kept busy, and the
#: activations of so few tokens are small beside any model's weights.
DEFAULT_PIECE_TOKENS = 2048


def parts_of(total: int, size: int) -> Iterable[slice]:
    """Parts of at most ``size`` of ``total`` tokens, one after the other: only the last may be shorter."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def pieces_of(rows: Sequence[Row], max_tokens: int | None = None) -> list[list[Row]]:
    """Pieces of at most ``max_tokens`` tokens each, padding counted; a longer row is a piece of its own.

    Rows are sorted by length, longest first: rows of a piece are of like length, and the first piece is the largest,
    so that a run that does not fit fails at once and the allocator's blocks fit every piece after it.
    """
    limit = DEFAULT_PIECE_TOKENS if max_tokens is None else max_tokens
    pieces: list[list[Row]] = []
    width = 0
    for row in sorted(rows, key=lambda row: (-row.length, row.index)):
        if pieces and (len(pieces[-1]) + 1) * width <= limit:
            pieces[-1].append(row)
        else:
            pieces.append([row])
            width = row.length
    return pieces


@dataclass
class Prompt:
    """The prompt of ``rows``, which goes through the model once for all of them."""

    rows: Sequence[Row]
    prefix: SharedPrefix | None = None

    def states(self, body: Any, inputs: Mapping[str, Any], rows: Sequence[Row]) -> list[torch.Tensor]:
        """Hidden states ``[completion, H]`` of ``rows``; the first call runs the prompt."""
        first = self.rows[0]
        if self.prefix is None:
            self.prefix = forward_prompt(body, inputs["prompt_ids"][first.index, first.offset :])
        ids = [inputs["completion_ids"][row.index, : row.completion] for row in rows]
        return forward_completions(body, self.prefix, ids)

    def close(self) -> torch.Tensor:
        """A scalar of value 0 whose backward is the prompt's, with what its completions' have left."""
        prefix, self.prefix = self.prefix, None
        anchor = torch.zeros((), requires_grad=True)
        run = prefix.backward if prefix is not None else lambda: None
        scalar: torch.Tensor = _Later.apply(anchor, run)  # type: ignore[no-untyped-call]
        return scalar


@dataclass
class Piece:
    """Rows of one forward. ``prompt``: they continue it; ``closes``: no rows, it is the prompt's backward.

    A piece of no rows and no prompt keeps a rank company that has nothing left to do.
    """

    rows: Sequence[Row] = field(default_factory=tuple)
    prompt: Prompt | None = None
    closes: bool = False


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, run: Callable[[], None]) -> torch.Tensor:
        ctx.run = run
        return torch.zeros_like(anchor)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[None, None]:
        ctx.run()
        return None, None


def plan(trainer: Any, inputs: Mapping[str, Any], rows: Sequence[Row]) -> list[Piece]:
    """The pieces of the rows that have a completion; groups that share a prompt come first."""
    live = [row for row in rows if row.completion]
    limit = trainer.args.max_tokens_per_piece
    pieces: list[Piece] = []
    if trainer.args.prefix_sharing and live and _may_share(trainer, live):
        alone: list[Row] = []
        for group in _groups(trainer, inputs, live):
            if len(group) > 1:
                pieces += _pieces_of_group(group, limit)
            else:
                alone += group
        live = alone
    return pieces + [Piece(part) for part in trainer._same_count(pieces_of(live, limit))]


def segments_refused(trainer: Any, rows: Sequence[Row]) -> str | None:
    """Why these rows cannot go through the model in segments (packed, or after a shared prompt), or None."""
    if trainer._ranks_run_together:
        return "FSDP and DeepSpeed run the wrapped model only"
    text = trainer._base_model(trainer.model).config.get_text_config()
    if trainer.model.training and getattr(text, "attention_dropout", 0.0):
        return "attention_dropout is on"
    rotary = getattr(text, "rope_parameters", None) or getattr(text, "rope_theta", None)
    if not rotary and any(row.offset for row in rows):
        return "positions are not rotary, and TRL counts padding"
    return segment_refusal(text, max(row.length for row in rows))


def _may_share(trainer: Any, rows: Sequence[Row]) -> bool:
    why = segments_refused(trainer, rows)
    if why is None and trainer.accelerator.scaler is not None:
        why = "fp16 gradients are scaled"
    if why is not None:
        trainer._warn(f"prompts are not shared: {why}")
    return why is None


def _groups(trainer: Any, inputs: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows with equal prompts, in order. Of tokens that cannot be read, neighbours are a group."""
    if is_fake(inputs["prompt_ids"]):
        size = trainer.num_generations
        yield from (list(rows[start : start + size]) for start in range(0, len(rows), size))
        return
    ids = inputs["prompt_ids"].tolist()
    found: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(ids[row.index][row.offset :]), []).append(row)
    yield from found.values()


def _pieces_of_group(group: Sequence[Row], limit: int | None) -> list[Piece]:
    prompt = Prompt(group)
    completions = [Row(row.index, row.offset, 0, row.completion) for row in group]
    by_index = {row.index: row for row in group}
    parts = [[by_index[row.index] for row in part] for part in pieces_of(completions, limit)]
    return [*(Piece(part, prompt) for part in parts), Piece((), prompt, closes=True)]
