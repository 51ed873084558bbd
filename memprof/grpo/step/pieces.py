"""Cut a micro-batch into pieces: what goes through the model together, and what completions of a prompt share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memprof.compat import transformers
from memprof.config.model_shape import ModelShape
from memprof.config.piece_size import MOST_TOKENS, piece_tokens, small_bytes
from memprof.errors import InputError
from memprof.grpo.micro_batch_inputs import MicroBatch
from memprof.grpo.rows import Row, is_fake
from memprof.grpo.step.context import StepContext
from memprof.grpo.step.random_state import RandomState
from memprof.grpo.techniques.layers import hands_arguments_down
from memprof.grpo.techniques.prefix import forward_completions, forward_prompt
from memprof.grpo.techniques.segment_attention import segment_refusal
from memprof.grpo.techniques.shared_prefix import SharedPrefix


def pieces_of(rows: Sequence[Row], limit: int) -> list[list[Row]]:
    """Gather rows into pieces of at most ``limit`` tokens, padding counted; a longer row is a piece of its own.

    Rows are sorted by length, longest first: rows of a piece are of like length, and the first piece is the largest,
    so that a run that does not fit fails at once and the allocator's blocks fit every piece after it.
    """
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
class SharedPrompt:
    """The prompt that ``rows`` share, run through the model once. ``begun``, ``ran``: the random state before that and
    after it, for what runs out of memory and is repeated."""

    rows: Sequence[Row]
    prefix: SharedPrefix | None = None
    begun: RandomState | None = None
    ran: RandomState | None = None

    def states(self, body: Any, inputs: MicroBatch, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Return hidden states ``[completion, H]`` of ``rows``; the first call runs the prompt."""
        if self.prefix is None:
            self.begun = RandomState.now(inputs["prompt_ids"].device)
            self.prefix = self._forward(body, inputs)
            self.ran = RandomState.now(inputs["prompt_ids"].device)
        ids = [inputs["completion_ids"][row.index, : row.completion] for row in rows]
        return forward_completions(body, self.prefix, ids)

    def close(self, body: Any, inputs: MicroBatch) -> torch.Tensor:
        """Return a scalar of value 0 whose backward is the prompt's, with the gradients that its completions left.

        Where that has run out of memory, the prompt runs forward again, and the completions need not.
        """
        prefix, earlier = self.prefix, None
        if prefix is not None and prefix.ran_out:
            assert self.begun is not None
            with RandomState.kept(inputs["prompt_ids"].device):
                self.begun.restore()
                prefix, earlier = self._forward(body, inputs), prefix

        def run() -> None:
            if prefix is not None:
                prefix.backward(earlier)
            self.prefix = None

        anchor = torch.zeros((), requires_grad=True)
        scalar: torch.Tensor = _Later.apply(anchor, run)  # type: ignore[no-untyped-call]
        return scalar

    def _forward(self, body: Any, inputs: MicroBatch) -> SharedPrefix:
        first = self.rows[0]
        return forward_prompt(body, inputs["prompt_ids"][first.index, first.offset :])


@dataclass
class Piece:
    """Rows of one forward. ``prompt``: they continue it; ``closes``: no rows, it is the prompt's backward. A piece of
    neither keeps a rank company that has nothing left to do."""

    rows: Sequence[Row] = field(default_factory=tuple)
    prompt: SharedPrompt | None = None
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


def plan(
    step: StepContext, inputs: MicroBatch, rows: Sequence[Row], *, graph: bool = True, balances: bool = False
) -> list[Piece]:
    """Cut the rows that have a completion into pieces; groups that share a prompt come first.

    ``graph``: the pieces will have a backward. ``balances``: prompts without a completion count in the router's loss.
    """
    live = [row for row in rows if row.completion or balances]
    limit = step.piece_tokens[0 if graph else 1]
    pieces: list[Piece] = []
    if step.settings.prefix_sharing and live and _may_share(step, live):
        alone: list[Row] = []
        for group in _groups(step, inputs, live):
            if len(group) > 1:
                pieces += _pieces_of_group(group, limit)
            else:
                alone += group
        live = alone
    return pieces + [Piece(part) for part in step.ranks.same_count(pieces_of(live, limit))]


def fits_one_piece(step: StepContext, rows: Sequence[Row]) -> bool:
    """Tell whether every rank has all its rows in one piece."""
    return not step.ranks.any(len(pieces_of(rows, step.piece_tokens[0])) > 1)


def segments_refused(step: StepContext, rows: Sequence[Row]) -> str | None:
    """Say why these rows cannot go through the model in segments (packed, or after a shared prompt), or None."""
    if step.ranks.forward_together:
        return "FSDP and DeepSpeed run the wrapped model only"
    if step.adapter_outside:
        return step.adapter_outside
    base = step.base_model()
    if not transformers.TAKES_ATTENTION_ARGUMENTS.of(base) or not hands_arguments_down(base):
        return "the model hands no arguments down to its attention"
    text = base.config.get_text_config()
    if step.policy.training and getattr(text, "attention_dropout", 0.0):
        return "attention_dropout is on"
    rotary = getattr(text, "rope_parameters", None) or getattr(text, "rope_theta", None)
    if not rotary and any(row.offset for row in rows):
        return "positions are not rotary, and TRL counts padding"
    return segment_refusal(text, max(row.length for row in rows))


def _may_share(step: StepContext, rows: Sequence[Row]) -> bool:
    why = segments_refused(step, rows)
    if why is None and step.balancing is not None:
        why = "the router's auxiliary loss counts a prompt once for each completion"
    if why is None and step.scales_gradients:
        why = "fp16 gradients are scaled"
    if why is not None:
        step.log.warn(f"prompts are not shared: {why}")
    return why is None


def _groups(step: StepContext, inputs: MicroBatch, rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Group rows with equal prompts, in order; where tokens cannot be read, neighbours are a group."""
    if is_fake(inputs["prompt_ids"]):
        size = step.group_size
        yield from (list(rows[start : start + size]) for start in range(0, len(rows), size))
        return
    ids = inputs["prompt_ids"].tolist()
    found: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(ids[row.index][row.offset :]), []).append(row)
    yield from found.values()


def _pieces_of_group(group: Sequence[Row], limit: int) -> list[Piece]:
    prompt = SharedPrompt(group)
    completions = [Row(row.index, row.offset, 0, row.completion) for row in group]
    by_index = {row.index: row for row in group}
    parts = [[by_index[row.index] for row in part] for part in pieces_of(completions, limit)]
    return [*(Piece(part, prompt) for part in parts), Piece((), prompt, closes=True)]


class PieceSizes:
    """Compute how many tokens a piece of one model has if the settings don't say.

    ``small_bytes``: what is small next to its weights.
    """

    def __init__(self, model: Any) -> None:
        self._weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        self._itemsize = model.dtype.itemsize
        self.small_bytes = small_bytes(self._weights)
        try:
            self._shape: ModelShape | None = ModelShape.of(model.config)
        except InputError:  # a family whose config has other names
            self._shape = None

    def of(self, settings: Any, checkpointing: str) -> tuple[int, int]:
        """Return the tokens of a piece with a graph, and of one without; ``checkpointing``: the kind in use."""
        if settings.max_tokens_per_piece is not None:
            return settings.max_tokens_per_piece, settings.max_tokens_per_piece
        if self._shape is None:
            return MOST_TOKENS, MOST_TOKENS
        whole = checkpointing in ("none", "mlp") or (checkpointing == "auto" and not settings.gradient_checkpointing)
        kept = self._shape.layers if whole else 0
        return (
            piece_tokens(self._shape, self._weights, self._itemsize, kept_layers=kept),
            piece_tokens(self._shape, self._weights, self._itemsize),
        )
