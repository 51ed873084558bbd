"""Decode sequences in a rolling batch over a pool of token slots.

All sequences decode together for as long as the pool holds them. Where it is full, the shortest gives its slots back
and waits; what it had is computed again, in one forward, when others have finished. Completions of one prompt share
the prompt's slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memprof.grpo.paged.cache import PooledCache, Rows, SlotPool
from memprof.grpo.paged.sampling import Sampling

__all__ = ["CHUNK", "PoolSize", "RollingBatch", "Work"]

#: Tokens of a prompt, or of a sequence that is computed again, that go through the model together.
CHUNK = 2048
# A sequence that waits comes back where all can then run on for a quarter of its tokens, and an eighth of the longest
# that one can be: each return computes its tokens again.
_RUN_ON, _RUN_ON_LEAST = 4, 8


@dataclass(frozen=True)
class PoolSize:
    """How much of keys and values a generation holds.

    Attributes:
        slots: tokens in the pool.
        gathered: tokens of one layer that are gathered for a forward: rows times the longest of them.
    """

    slots: int
    gathered: int


@dataclass
class Work:
    """Count what a generation ran: ``steps`` decode steps of ``rows`` rows in all, ``forwards`` over ``again`` tokens
    that were computed before."""

    steps: int = 0
    rows: int = 0
    forwards: int = 0
    again: int = 0


@dataclass
class _Prompt:
    """A prompt, its slots while any of its ``users`` decodes, and the logits ``[1, vocabulary]`` that follow it."""

    ids: list[int]
    slots: list[int] = field(default_factory=list)
    users: int = 0
    logits: torch.Tensor | None = None


@dataclass
class _Row:
    index: int
    prompt: _Prompt
    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    @property
    def held(self) -> int:
        """Tokens whose keys and values a decode step attends to, its own included."""
        return len(self.prompt.ids) + len(self.tokens)


class RollingBatch:
    """Decode until every sequence has ended.

    Args:
        model: the causal LM.
        prompts: token ids of each sequence's prompt; equal ones are computed and held once.
        sampling: how tokens are chosen and what ends a sequence.
        size: of the pool; one sequence of full length always has room.
        work: counts what is run.
    """

    def __init__(
        self, model: Any, prompts: Sequence[Sequence[int]], sampling: Sampling, size: PoolSize, work: Work
    ) -> None:
        self._model, self._sampling, self._size, self.work = model, sampling, size, work
        self._device = next(model.parameters()).device
        longest = max(map(len, prompts)) + sampling.longest
        self._pool = SlotPool(max(size.slots, longest))
        self._cache = PooledCache(self._pool.size)
        self._table = torch.full((len(prompts), longest), self._pool.size, device=self._device)
        known: dict[tuple[int, ...], _Prompt] = {}
        rows = [known.setdefault(tuple(ids), _Prompt(list(ids))) for ids in prompts]
        self._rows = [_Row(i, prompt) for i, prompt in enumerate(rows)]
        self._waiting, self._active = list(self._rows), list[_Row]()

    @torch.no_grad()
    def run(self) -> list[list[int]]:
        """Return each sequence's new tokens, the one that ended it included."""
        while self._waiting or self._active:
            self._admit()
            if self._active:
                self._make_room()
                self._decode()
        return [row.tokens for row in self._rows]

    # -- who decodes -------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        for row in list(self._waiting):
            if self._active and not self._has_room_for(row):
                continue
            self._waiting.remove(row)
            self._compute(row)
            if not self._ended(row):
                self._active.append(row)

    def _has_room_for(self, row: _Row) -> bool:
        """Tell whether a row can join and all can run on for long enough to be worth what is computed again."""
        together = [*self._active, row]
        left = self._sampling.longest - max(len(one.tokens) for one in together)
        run_on = min(left, max(self._sampling.longest // _RUN_ON_LEAST, len(row.tokens) // _RUN_ON, 1))
        prompt = 0 if row.prompt.users else len(row.prompt.ids)
        free = self._pool.free - prompt - len(row.tokens)
        return free >= run_on * len(together) and self._gathers(together, run_on)

    def _gathers(self, rows: list[_Row], more: int = 0) -> bool:
        return len(rows) * (max(row.held for row in rows) + more) <= self._size.gathered

    def _make_room(self) -> None:
        """Send the shortest to wait until the rest can decode a step. The longest is never sent."""
        while len(self._active) > 1 and (self._pool.free < len(self._active) or not self._gathers(self._active)):
            row = min(self._active, key=lambda one: len(one.tokens))
            self._leave(row)
            self._waiting.append(row)
            self._waiting.sort(key=lambda one: one.index)

    def _leave(self, row: _Row) -> None:
        if row in self._active:
            self._active.remove(row)
        self._pool.give_back(row.slots)
        row.slots = []
        row.prompt.users -= 1
        if not row.prompt.users:
            self._pool.give_back(row.prompt.slots)
            row.prompt.slots = []

    def _ended(self, row: _Row) -> bool:
        """Tell whether a row's last token ended it; its slots are given back then."""
        ended = row.tokens[-1] in self._sampling.stop or len(row.tokens) >= self._sampling.longest
        if ended:
            self._leave(row)
        return ended

    # -- forwards ----------------------------------------------------------------------------------------------------

    def _compute(self, row: _Row) -> None:
        """Fill the pool with a row's prompt, unless it is there, and with the tokens it had; choose its first token.

        The keys and values of its last token are the next decode step's.
        """
        prompt, had = row.prompt, row.tokens[:-1]
        past = len(prompt.ids)
        start = past if prompt.users else 0
        if not prompt.users:
            prompt.slots = self._pool.take(past)
        prompt.users += 1
        row.slots = self._pool.take(len(had))
        self._table[row.index, : past + len(had)] = torch.tensor([*prompt.slots, *row.slots], device=self._device)
        self.work.again += len(had)
        ids = [*prompt.ids, *had]
        for begin in range(start, len(ids), CHUNK):
            logits = self._forward_one(row, ids[begin : begin + CHUNK], begin)
            if begin + CHUNK >= len(ids) and not row.tokens:
                prompt.logits = logits
        if not row.tokens:
            assert prompt.logits is not None  # the first of a prompt's rows has left them
            row.tokens += self._choose(prompt.logits, [row])

    def _forward_one(self, row: _Row, ids: list[int], begin: int) -> torch.Tensor:
        self.work.forwards += 1
        end = begin + len(ids)
        read = self._table[row.index : row.index + 1, :end]
        positions = torch.arange(begin, end, device=self._device)[None]
        return self._forward(torch.tensor([ids], device=self._device), positions, None, read)

    def _decode(self) -> None:
        """Choose one more token for every active row."""
        rows = self._active
        for row, slot in zip(rows, self._pool.take(len(rows)), strict=True):
            row.slots.append(slot)
        index = torch.tensor([row.index for row in rows], device=self._device)
        held = torch.tensor([row.held for row in rows], device=self._device)
        slots = torch.tensor([row.slots[-1] for row in rows], device=self._device)
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
        for row, token in zip(list(rows), self._choose(logits, rows), strict=True):
            row.tokens.append(token)
            self._ended(row)

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, read: torch.Tensor
    ) -> torch.Tensor:
        """Run new tokens ``[rows, new]``; return the last one's logits ``[rows, vocabulary]``."""
        new = ids.shape[1]
        self._cache.rows = Rows(write=read[:, -new:].flatten(), read=read, new=new)
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

    def _choose(self, logits: torch.Tensor, rows: list[_Row]) -> list[int]:
        ids = None
        if self._sampling.reads_tokens:
            whole = [[*row.prompt.ids, *row.tokens] for row in rows]
            longest = max(map(len, whole))
            ids = torch.tensor(list(_repeated(whole, longest)), device=self._device)
        places = [len(row.tokens) for row in rows]
        return self._sampling.next_tokens(logits, [row.index for row in rows], places, ids)


def _repeated(rows: list[list[int]], length: int) -> Iterator[list[int]]:
    """Make rows equally long by repeating the first token, which says nothing new of what a row contains."""
    for row in rows:
        yield [row[0]] * (length - len(row)) + row
