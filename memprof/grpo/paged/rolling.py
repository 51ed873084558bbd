"""Decode sequences in a rolling batch over a pool of token slots: run a model as the schedule says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memprof.config.model_shape import ModelShape
from memprof.grpo.paged.cache import PooledCache, SlotPool, TokenPlaces
from memprof.grpo.paged.sampling import Sampling
from memprof.grpo.paged.schedule import (
    CachedPrompt,
    Compute,
    DecodingSchedule,
    GenerationCounts,
    Leave,
    PoolSize,
    SequenceProgress,
    chunks_of,
)


@dataclass(eq=False)
class _Prompt(CachedPrompt):
    """A prompt, its slots while any of its users decodes, and the logits ``[1, vocabulary]`` that follow it."""

    ids: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None


@dataclass(eq=False)
class DecodingSequence(SequenceProgress):
    """A sequence: the tokens it has, and the slots of all but the last."""

    prompt: _Prompt
    tokens: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)


class RollingBatch:
    """Decode until every sequence has ended; equal prompts are computed and held once, and ``work`` counts what is run.

    ``free`` frees device memory after it has run out, so that decoding goes on with a smaller pool; None: it ends.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        size: PoolSize,
        work: GenerationCounts,
        free: Callable[[], None] | None = None,
    ) -> None:
        self._model, self._sampling, self.work, self._free = model, sampling, work, free
        self._device = next(model.parameters()).device
        self._shape = (len(prompts), max(map(len, prompts)) + sampling.longest)
        self._begin(size.with_room_for(*self._shape))
        known: dict[tuple[int, ...], _Prompt] = {}
        found = [known.setdefault(tuple(ids), _Prompt(len(ids), ids=list(ids))) for ids in prompts]
        self._rows = [DecodingSequence(i, prompt) for i, prompt in enumerate(found)]

    def _begin(self, size: PoolSize) -> None:
        """Take an empty pool; its memory comes with the first forward."""
        count, longest = self._shape
        self._size, self._pool = size, SlotPool(size.slots)
        self._cache = PooledCache(self._pool.size, max(longest, size.gathered), _alike_layers(self._model))
        self._table = torch.full((count, longest), self._pool.size, device=self._device)

    @torch.no_grad()
    def run(self) -> list[list[int]]:
        """Return each sequence's new tokens, the one that ended it included. The pool is given back then."""
        again = False
        while (said := self._run_until_full()) is not None:
            again = self._shrink(said, again)
        return [row.tokens for row in self._rows]

    def _run_until_full(self) -> str | None:
        """Decode until every sequence has ended; where memory runs out before, return what the allocator said."""
        try:
            rows = [row for row in self._rows if not row.ended]
            for action in DecodingSchedule(rows, self._size, self._sampling.longest).actions():
                if isinstance(action, Compute):
                    self._compute(action.row)
                elif isinstance(action, Leave):
                    self._leave(action.row)
                else:
                    self._decode(action.rows, action.steps)
        except torch.OutOfMemoryError as error:
            if self._free is None:
                raise
            return str(error)
        finally:
            self._cache.layers.clear()  # a layer knows its cache: else the pool would wait for the garbage collector
        return None

    def _shrink(self, said: str, again: bool) -> bool:
        """Go on from the tokens there are, with a pool of half the size; the smallest is tried twice."""
        longest = self._shape[1]
        smaller = PoolSize(max(longest, self._size.slots // 2), max(longest, self._size.gathered // 2))
        least = smaller == self._size
        if least and again:
            raise torch.OutOfMemoryError(f"{said}\nThe lean trainer can't generate even one sequence at a time.")
        for row in self._rows:
            row.places, row.prompt.slots, row.prompt.users = [], [], 0
        assert self._free is not None
        self._free()
        self._begin(smaller)
        self.work.shrunk = smaller
        return least

    def _leave(self, row: Any) -> None:
        self._pool.give_back(row.places)
        row.places = []
        if not row.prompt.users:
            self._pool.give_back(row.prompt.slots)
            row.prompt.slots = []

    def _add(self, row: DecodingSequence, token: int) -> None:
        row.tokens.append(token)
        row.made += 1
        row.ended = token in self._sampling.stop or row.made >= self._sampling.longest

    # -- forwards ----------------------------------------------------------------------------------------------------

    def _compute(self, row: Any) -> None:
        """Fill the pool with a row's prompt, unless it is there, and with the tokens it had; choose its first token."""
        prompt = row.prompt
        if not row.tokens and prompt.logits is not None:
            self._add(row, *self._choose(prompt.logits, [row]))
            if row.ended:  # its prompt has not to be there
                return
        had = row.tokens[:-1]
        chunks = chunks_of(row, shared=bool(prompt.slots))
        if not prompt.slots:
            prompt.slots = self._pool.take(prompt.length)
        row.places = self._pool.take(len(had))
        held = [*prompt.slots, *row.places]
        self._table[row.index, : len(held)] = torch.tensor(held, device=self._device)
        self.work.again += len(had)
        self.work.forwards += len(chunks)
        ids = [*prompt.ids, *had]
        for chunk in chunks:
            logits = self._forward_one(row, ids[chunk.start : chunk.stop], chunk.start)
            if chunk.stop == len(ids) and not row.tokens:
                prompt.logits = logits
        if not row.tokens:
            assert prompt.logits is not None  # the first of a prompt's rows has left them
            self._add(row, *self._choose(prompt.logits, [row]))

    def _forward_one(self, row: DecodingSequence, ids: list[int], begin: int) -> torch.Tensor:
        end = begin + len(ids)
        read = self._table[row.index : row.index + 1, :end]
        positions = torch.arange(begin, end, device=self._device)[None]
        return self._forward(torch.tensor([ids], device=self._device), positions, None, read)

    def _decode(self, rows: list[Any], steps: int) -> None:
        for _ in range(steps):
            self._decode_step(rows)
            if any(row.ended for row in rows):
                return

    def _decode_step(self, rows: list[Any]) -> None:
        """Choose one more token for every row."""
        for row, slot in zip(rows, self._pool.take(len(rows)), strict=True):
            row.places.append(slot)
        index = torch.tensor([row.index for row in rows], device=self._device)
        held = torch.tensor([row.held for row in rows], device=self._device)
        slots = torch.tensor([row.places[-1] for row in rows], device=self._device)
        self._table[index, held - 1] = slots
        longest = max(row.held for row in rows)
        # Rows stand at the right, as generate's do, so that masks and windows count from their ends.
        place = torch.arange(longest, device=self._device)[None] - (longest - held)[:, None]
        read = self._table[index].gather(1, place.clamp(min=0))
        padded = len({row.held for row in rows}) > 1
        read = torch.where(place < 0, self._pool.size, read) if padded else read
        mask = (place >= 0).long() if padded else None
        ids = torch.tensor([[row.tokens[-1]] for row in rows], device=self._device)
        logits = self._forward(ids, (held - 1)[:, None], mask, read)
        self.work.steps += 1
        self.work.rows += len(rows)
        for row, token in zip(rows, self._choose(logits, rows), strict=True):
            self._add(row, token)

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, read: torch.Tensor
    ) -> torch.Tensor:
        """Run new tokens ``[rows, new]``; return the last one's logits ``[rows, vocabulary]``."""
        new = ids.shape[1]
        self._cache.rows = TokenPlaces(write=read[:, -new:].flatten(), read=read, new=new)
        found = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        last: torch.Tensor = found.logits[:, -1]
        return last

    def _choose(self, logits: torch.Tensor, rows: list[DecodingSequence]) -> list[int]:
        found: list[int] = self._chosen(logits, rows).tolist()
        if max(found) >= logits.shape[-1]:  # no sum of such probabilities passes a draw
            raise RuntimeError("The next token's probabilities contain inf or nan: the model's weights have diverged.")
        return found

    def _chosen(self, logits: torch.Tensor, rows: list[DecodingSequence]) -> torch.Tensor:
        """Choose each row's next token ``[rows]``, on the device."""
        ids = None
        if self._sampling.reads_tokens:
            whole = [[*row.prompt.ids, *row.tokens] for row in rows]
            longest = max(map(len, whole))
            ids = torch.tensor(list(_repeated(whole, longest)), device=self._device)
        places = [len(row.tokens) for row in rows]
        return self._sampling.next_tokens(logits, [row.index for row in rows], places, ids)


def _alike_layers(model: Any) -> int:
    """Count the layers that keep keys and values, where all of them keep as much; else 0."""
    shape = ModelShape.of(model.config)
    alike = shape.caching_layers * shape.largest_kv_cache_bytes(1, 1) == shape.kv_cache_bytes(1, 1)
    return shape.caching_layers if alike else 0


def _repeated(rows: list[list[int]], length: int) -> Iterator[list[int]]:
    """Make rows equally long by repeating the first token, which says nothing new of what a row contains."""
    for row in rows:
        yield [row[0]] * (length - len(row)) + row
