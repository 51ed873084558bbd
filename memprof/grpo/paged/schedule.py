"""Decide over lengths alone which sequences of a rolling batch decode together, and which wait for room.

All sequences decode together for as long as the pool holds them. Where it is full, the shortest gives its slots back
and waits; what it had is computed again, in one forward, when others have finished. Completions of one prompt share
the prompt's slots. Whoever decodes follows these actions: the trainer with a model, the simulator with lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

#: Tokens of a prompt, or of a sequence that is computed again, that go through the model together.
CHUNK = 2048
# A sequence that waits comes back where all can then run on for a quarter of its tokens, and an eighth of the longest
# that one can be: each return computes its tokens again.
_RUN_ON, _RUN_ON_LEAST = 4, 8


@dataclass(frozen=True)
class PoolSize:
    """A generation's pool: ``slots`` tokens of keys and values; ``gathered`` tokens of one layer for a forward, rows
    times the longest of them."""

    slots: int
    gathered: int

    def with_room_for(self, sequences: int, longest: int) -> PoolSize:
        """Return a size in which one sequence of ``longest`` tokens always has room; no more is gathered than all."""
        return PoolSize(max(self.slots, longest), min(self.gathered, sequences * longest))


@dataclass
class GenerationCounts:
    """Count what a generation ran: ``steps`` decode steps of ``rows`` rows in all, ``forwards`` over ``again`` tokens
    that were computed before. ``shrunk``: the pool it went on with after memory had run out."""

    steps: int = 0
    rows: int = 0
    forwards: int = 0
    again: int = 0
    shrunk: PoolSize | None = None


@dataclass(eq=False)
class CachedPrompt:
    """A prompt's tokens, and how many sequences that hold slots read it."""

    length: int
    users: int = 0


@dataclass(eq=False)
class SequenceProgress:
    """How far a sequence is: ``made`` tokens, of which all but the last have slots while it decodes. Whoever follows
    the actions keeps ``made`` and ``ended``."""

    index: int
    prompt: CachedPrompt
    made: int = 0
    ended: bool = False

    @property
    def held(self) -> int:
        """Return how many tokens a decode step attends to, its own included."""
        return self.prompt.length + self.made

    @property
    def slots(self) -> int:
        """Return how many slots of its own the sequence has, or needs to come back."""
        return max(0, self.made - 1)


class Compute(NamedTuple):
    """Fill the pool with a row's prompt, unless it is there, and with the tokens it had; choose its first token."""

    row: SequenceProgress


class Leave(NamedTuple):
    """Give a row's slots back: it has ended, or waits."""

    row: SequenceProgress


class Decode(NamedTuple):
    """Choose one more token for every row, ``steps`` times or until one of them ends."""

    rows: list[SequenceProgress]
    steps: int


Action = Compute | Leave | Decode


class DecodingSchedule:
    """Say what to do next until every sequence has ended.

    ``rows`` are in the order in which they are wanted; ``size`` has room for the longest; no completion has more than
    ``longest`` tokens.
    """

    def __init__(self, rows: Sequence[SequenceProgress], size: PoolSize, longest: int) -> None:
        self._size, self._longest = size, longest
        self._waiting, self._active = list(rows), list[SequenceProgress]()
        self._free = size.slots

    def actions(self) -> Iterator[Action]:
        """Yield what to do; each is done before the next is asked for."""
        while self._waiting or self._active:
            yield from self._admit()
            if self._active:
                yield from self._make_room()
                rows, made = list(self._active), self._active[0].made
                yield Decode(rows, self._steps())
                self._free -= len(rows) * (rows[0].made - made)
                yield from (self._leave(row) for row in rows if row.ended)

    def _admit(self) -> Iterator[Action]:
        for row in list(self._waiting):
            if self._active and not self._has_room_for(row):
                continue
            self._waiting.remove(row)
            self._active.append(row)
            self._free -= row.slots + (0 if row.prompt.users else row.prompt.length)
            row.prompt.users += 1
            yield Compute(row)
            if row.ended:
                yield self._leave(row)

    def _has_room_for(self, row: SequenceProgress) -> bool:
        """Tell whether a row can join and all can run on for long enough to be worth what is computed again."""
        together = [*self._active, row]
        left = self._longest - max(one.made for one in together)
        run_on = min(left, max(self._longest // _RUN_ON_LEAST, row.made // _RUN_ON, 1))
        prompt = 0 if row.prompt.users else row.prompt.length
        free = self._free - prompt - row.made
        return free >= run_on * len(together) and self._gathers(together, run_on)

    def _gathers(self, rows: Sequence[SequenceProgress], more: int = 0) -> bool:
        return len(rows) * (max(row.held for row in rows) + more) <= self._size.gathered

    def _make_room(self) -> Iterator[Action]:
        """Send the shortest to wait until the rest can decode a step. The longest is never sent."""
        while len(self._active) > 1 and (self._free < len(self._active) or not self._gathers(self._active)):
            row = min(self._active, key=lambda one: one.made)
            yield self._leave(row)
            self._waiting.append(row)
            self._waiting.sort(key=lambda one: one.index)

    def _steps(self) -> int:
        """Count the decode steps until the pool is full, or one of the rows has its last token."""
        rows = self._active
        steps = min(self._free // len(rows), self._longest - max(row.made for row in rows))
        if len(rows) > 1:
            steps = min(steps, self._size.gathered // len(rows) - max(row.held for row in rows) + 1)
        return steps

    def _leave(self, row: SequenceProgress) -> Leave:
        self._active.remove(row)
        row.prompt.users -= 1
        self._free += row.slots + (0 if row.prompt.users else row.prompt.length)
        return Leave(row)


def actions_at_full_length(rows: Sequence[SequenceProgress], size: PoolSize, longest: int) -> Iterator[Action]:
    """Yield the actions of sequences none of which ends before its last token, as each row is before the action."""
    for action in DecodingSchedule(rows, size, longest).actions():
        yield action
        if isinstance(action, Compute):
            action.row.made = max(1, action.row.made)
            action.row.ended = action.row.made >= longest
        elif isinstance(action, Decode):
            for row in action.rows:
                row.made += action.steps
                row.ended = row.made >= longest


def chunks_of(row: SequenceProgress, *, shared: bool) -> list[range]:
    """Return the tokens of the forwards that compute a row's prompt, unless it is ``shared``, and what it had."""
    start, end = row.prompt.length if shared else 0, row.prompt.length + row.slots
    return [range(begin, min(begin + CHUNK, end)) for begin in range(start, end, CHUNK)]
