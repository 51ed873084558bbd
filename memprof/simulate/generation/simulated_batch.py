"""Run the lean trainer's rolling batch on fake tensors: every action of its schedule, a few of its forwards.

None of the sequences ends before its last token. The pool, the prompt's first forward, the decode steps of most rows
and of most gathered tokens and the forwards of most tokens are executed, so the highest memory is. The work of the
others is that of forwards like them, which the first generation with a pool of this size executes beside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from memprof.compat import patching
from memprof.compat import transformers as transformers_names
from memprof.grpo.paged.rolling import DecodingSequence, RollingBatch
from memprof.grpo.paged.schedule import (
    CachedPrompt,
    Compute,
    Decode,
    PoolSize,
    SequenceProgress,
    actions_at_full_length,
    chunks_of,
)
from memprof.simulate.recorder.flops import Tally
from memprof.simulate.recorder.session import FakeSession

# Numbers of rows whose decode steps are executed to know their work, at most.
_COUNTS = 6


@dataclass(frozen=True)
class Stretch:
    """Decode steps of the same ``rows``, one after another: at the first the longest row has ``begin`` tokens."""

    rows: int
    begin: int
    steps: int

    @property
    def end(self) -> int:
        """Count the tokens of the longest row at the last step."""
        return self.begin + self.steps - 1


@dataclass
class GenerationWork:
    """Hold what a generation's forwards do, once one with this pool was run; ``total`` is all of their work."""

    stretches: list[Stretch] = field(default_factory=list)  #: of each Decode, in the order of the actions
    chunks: list[list[range]] = field(default_factory=list)  #: of each Compute
    total: Tally | None = None


def planned(prompts: Sequence[Sequence[int]], size: PoolSize, longest: int) -> GenerationWork:
    """List the decode steps and the forwards of a generation, from lengths alone."""
    known: dict[tuple[int, ...], CachedPrompt] = {}
    rows = [
        SequenceProgress(index, known.setdefault(tuple(ids), CachedPrompt(len(ids))))
        for index, ids in enumerate(prompts)
    ]
    found = GenerationWork()
    for action in actions_at_full_length(rows, size, longest):
        if isinstance(action, Decode):
            found.stretches.append(Stretch(len(action.rows), max(row.held for row in action.rows), action.steps))
        elif isinstance(action, Compute):
            found.chunks.append(chunks_of(action.row, shared=action.row.prompt.users > 1))
    return found


def executed(stretches: Sequence[Stretch], *, learn: bool) -> dict[int, set[int]]:
    """Choose the decode steps that are executed: the number of a stretch -> the steps of it.

    Always those of the most rows and of the most gathered tokens. ``learn``: the shortest and the longest of a few
    numbers of rows too.
    """
    if not stretches:
        return {}
    numbers = range(len(stretches))
    most = max(numbers, key=lambda n: (stretches[n].rows, stretches[n].end))
    widest = max(numbers, key=lambda n: stretches[n].rows * stretches[n].end)
    found: dict[int, set[int]] = {}
    for number in (most, widest):
        found.setdefault(number, set()).add(stretches[number].steps - 1)
    for count in _some(sorted({one.rows for one in stretches})) if learn else ():
        mine = [n for n in numbers if stretches[n].rows == count]
        first, last = min(mine, key=lambda n: stretches[n].begin), max(mine, key=lambda n: stretches[n].end)
        found.setdefault(first, set()).add(0)
        found.setdefault(last, set()).add(stretches[last].steps - 1)
    return found


def _some(counts: list[int]) -> list[int]:
    """Return at most :data:`_COUNTS` of the numbers, the first and the last among them."""
    if len(counts) <= _COUNTS:
        return counts
    return [counts[round(i * (len(counts) - 1) / (_COUNTS - 1))] for i in range(_COUNTS)]


def executed_chunks(chunks: Sequence[Sequence[range]], *, learn: bool) -> set[tuple[int, int]]:
    """Choose the forwards over prompts and over what is computed again that are executed: (Compute, its chunk).

    Always the first, which takes the pool, and those of the most tokens, and after the most, and of most pairs of them.
    ``learn``: one of each power of two of tokens too, which stands after as many as the others do at their middle.
    """
    every = [(n, place, one) for n, some in enumerate(chunks) for place, one in enumerate(some)]
    if not every:
        return set()
    found = {every[0][:2]}
    for height in (len, lambda one: one.stop, lambda one: len(one) * one.stop):
        found.add(max(every, key=lambda entry: height(entry[2]))[:2])
    sizes: dict[int, list[tuple[int, int, range]]] = {}
    for entry in every if learn else ():
        sizes.setdefault(len(entry[2]).bit_length(), []).append(entry)
    for alike in sizes.values():
        found.add(sorted(alike, key=lambda entry: entry[2].stop)[len(alike) // 2][:2])
    return found


class SimulatedBatch(RollingBatch):
    """The trainer's rolling batch, of whose forwards a few are executed.

    ``known``: what generations before did, by pool and prompts; filled.
    """

    def __init__(self, *given: Any, session: FakeSession, known: dict[Any, GenerationWork]) -> None:
        super().__init__(*given)
        self._sampling = replace(self._sampling, stop=frozenset())
        self._work = session.fake_recorder.work
        prompts = [row.prompt.ids for row in self._rows]
        key = (self._size, tuple((len(ids), ids[0]) for ids in prompts))
        learns = key not in known
        self._plan = known.setdefault(key, GenerationWork())
        if learns:
            self._plan = known[key] = planned(prompts, self._size, self._sampling.longest)
        counts = self._work.wanted
        self._steps_executed = executed(self._plan.stretches, learn=learns and counts)
        self._chunks_executed = executed_chunks(self._plan.chunks, learn=learns and counts)
        self._stretch = self._computed = -1
        self._chunk = 0
        self._step_tallies: dict[tuple[int, int], Tally] = {}  # rows, tokens of the longest
        self._chunk_tallies: dict[tuple[int, int], Tally] = {}  # tokens, the last one's place

    @property
    def size(self) -> PoolSize:
        return self._size

    @torch.no_grad()
    def run(self) -> list[list[int]]:
        found = super().run()
        self._count_work()
        return found

    # -- of the rolling batch --------------------------------------------------------------------------------------

    def _decode(self, rows: list[Any], steps: int) -> None:
        self._stretch += 1
        wanted = self._steps_executed.get(self._stretch, set())
        done = 0
        for step in sorted(wanted):
            self._skip(rows, step - done)
            with self._apart(self._step_tallies, (len(rows), max(row.held for row in rows))), _padded(rows):
                self._decode_step(rows)
            done = step + 1
        self._skip(rows, steps - done)

    def _skip(self, rows: list[Any], steps: int) -> None:
        """Advance so many steps that are not executed."""
        for row in rows:
            row.places += self._pool.take(steps)
            row.tokens += [0] * steps
            row.made += steps
            row.ended = row.made >= self._sampling.longest
        self.work.steps += steps
        self.work.rows += steps * len(rows)

    def _compute(self, row: Any) -> None:
        self._computed += 1
        self._chunk = -1
        super()._compute(row)

    def _forward_one(self, row: DecodingSequence, ids: list[int], begin: int) -> torch.Tensor:
        self._chunk += 1
        if (self._computed, self._chunk) not in self._chunks_executed:
            return torch.empty(0, device="meta")
        with self._apart(self._chunk_tallies, (len(ids), begin + len(ids))):
            return super()._forward_one(row, ids, begin)

    def _choose(self, logits: torch.Tensor, rows: list[DecodingSequence]) -> list[int]:
        if logits.device.type != "meta":
            self._chosen(logits, rows)
        return [0] * len(rows)

    # -- work ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _apart(self, tallies: dict[tuple[int, int], Tally], key: tuple[int, int]) -> Iterator[None]:
        """Keep the work of a forward for :meth:`_count_work`."""
        with self._work.apart() as parts:
            yield
        tallies[key] = parts[0]

    def _count_work(self) -> None:
        """Count the whole generation's work, which follows from the executed forwards of the first one like it."""
        if not self._work.wanted:
            return
        plan = self._plan
        if plan.total is None:
            plan.total = Tally()
            for stretch in plan.stretches:
                self._add_stretch(plan.total, stretch)
            for chunk in (one for some in plan.chunks for one in some):
                self._add_chunk(plan.total, chunk)
        self._work.add(plan.total, 1)

    def _add_stretch(self, total: Tally, stretch: Stretch) -> None:
        """Count steps as those of the next larger number of rows: of its shortest and longest, by the mean length."""
        counts = sorted({rows for rows, _ in self._step_tallies})
        rows = next((count for count in counts if count >= stretch.rows), counts[-1])
        lengths = sorted(length for count, length in self._step_tallies if count == rows)
        low, high = lengths[0], lengths[-1]
        share = ((stretch.begin + stretch.end) / 2 - low) / (high - low) if high > low else 0.0
        share = min(1.0, max(0.0, share))
        total.add_all(self._step_tallies[rows, low], stretch.steps * (1 - share))
        total.add_all(self._step_tallies[rows, high], stretch.steps * share)

    def _add_chunk(self, total: Tally, chunk: range) -> None:
        """Count a forward as the executed one that is nearest in its tokens."""
        tokens, end = min(
            self._chunk_tallies, key=lambda key: (abs(key[0] - len(chunk)), abs(key[1] - chunk.stop))
        )
        total.add_all(self._chunk_tallies[tokens, end], 1)


@contextlib.contextmanager
def _padded(rows: Sequence[SequenceProgress]) -> Iterator[None]:
    """Answer transformers that a mask is not all ones, where rows are of unequal length."""
    if len({row.held for row in rows}) == 1:
        yield
        return
    ask = transformers_names.MASK_IS_ALL.get()

    def some(tensor: Any) -> Any:
        answer = ask(tensor)
        answer._memprof_scalar = False
        return answer

    with patching((transformers_names.MASK_IS_ALL, some)):
        yield
