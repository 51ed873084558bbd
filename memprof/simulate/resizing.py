"""Resize a simulated run: what its allocations would be with other lengths or batches, without simulating again.

What grows with the tokens (by category) and is a multiple of the tokens that go through the model together is resized
with them; what is no such multiple stays. A size can be a multiple by chance, and a run of another size can take
other steps: a resized run says where to look, and a simulation there says whether it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from memprof.allocator.replay import ALLOC, FLUSH, Program, in_order
from memprof.config.catalogue import find_config
from memprof.config.fits import room_bytes
from memprof.config.gpus import Gpu
from memprof.config.model_shape import ModelShape
from memprof.config.piece_size import MOST_TOKENS
from memprof.config.settings import Settings, TrainerSettings
from memprof.grpo.techniques.apply import TILE_TOKENS
from memprof.plan.simulations import Changes, SizeChoices
from memprof.simulate.ensemble import BY_TOKENS, all_fit, margin_kept
from memprof.vocabulary import Category, Phase

if TYPE_CHECKING:
    from memprof.analysis.analysis import Analysis

I64 = NDArray[np.int64]

_WIDTHS = np.array([1, 2, 4, 8])  # of an element, beside a stored weight's
_ROUND = 512  # bytes: the allocator's least block
# Lengths that a decode step's tensors have, below the whole sequence's: the last tokens are those that are executed.
_BEFORE_THE_END = (1, 2, 3, 4, 0)
# Shares of the room that a run may hold to be looked at, the most first: how much more it reserves is not known before.
_SHARES = (1.0, 0.985, 0.97, 0.95, 0.92, 0.88, 0.8)
# What holds more than this share of the room at its smallest is given up; below, a simulation decides.
_HOPELESS = 1.1


class Resizable:
    """Hold a simulated run as a program of allocations, with what grows when its ``settings`` do."""

    def __init__(self, analysis: Analysis, settings: Settings) -> None:
        category, categories = analysis.attribution.category, list(Category)
        self.settings = settings
        self.program = analysis.timeline.program()
        grows = np.isin(category, [categories.index(name) for name in BY_TOKENS])
        standing = self.program.requested[category == categories.index(Category.WEIGHTS)]
        # A weight in another dtype, unpacked or as a gradient, in a kernel's own tensor.
        grows &= ~np.isin(self.program.requested, np.unique(standing[:, None] * _WIDTHS))
        generating = analysis.attribution.phase == Phase.GENERATE.code
        caches = category == categories.index(Category.KV_CACHE)
        self._in_full = any("in full" in note for note in analysis.snapshot.run.notes)
        self._groups = {
            "train": np.flatnonzero(grows & ~generating),
            "cache": np.flatnonzero(grows & generating & caches),
            "generate": np.flatnonzero(grows & generating & ~caches),
        }
        what, rows = in_order(self.program)
        self._order, self._sign = rows[what != FLUSH], np.where(what[what != FLUSH] == ALLOC, 1, -1)
        config = analysis.snapshot.run.config or {}
        open_tiles = settings.lean and settings.tiled_mlp is None and settings.checkpointing != "none"
        self._inner = ModelShape.of(find_config(settings.model)).intermediate if open_tiles else 0
        self._trained = self._rows_of_a_piece(int(config.get("hidden_size") or 0))

    def _rows_of_a_piece(self, hidden: int) -> int:
        """Return how many sequences went through the model together in training: those most tensors are of."""
        rows, length = self.settings.per_device_train_batch_size, self.settings.sequence_length
        if not self.settings.lean or not hidden:
            return rows
        sizes = self.program.requested[self._groups["train"]]
        seen = {n: int((sizes == 2 * n * length * hidden).sum()) for n in range(1, rows + 1)}
        return max(seen, key=lambda n: (seen[n], -n))

    def resized(self, wanted: Settings) -> Program:
        """Return the program with other lengths and batches."""
        return replace(self.program, requested=self._sizes(wanted))

    def held(self, wanted: Settings) -> int:
        """Return the most bytes of blocks in use while the resized program runs; less than any allocator reserves."""
        sizes = -(-self._sizes(wanted) // _ROUND) * _ROUND
        return int(np.cumsum(sizes[self._order] * self._sign).max(initial=0))

    def _sizes(self, wanted: Settings) -> I64:
        sizes: I64 = self.program.requested.copy()
        for name, rows in self._groups.items():
            mine = sizes[rows]
            waiting = np.ones(len(mine), bool)
            for old, new in self._multiples(name, wanted):
                match = waiting & (mine % old == 0)
                mine[match] = mine[match] // old * new
                waiting &= ~match
            sizes[rows] = mine
        return sizes

    def _trained_then(self, wanted: TrainerSettings) -> int:
        rows, tokens = wanted.per_device_train_batch_size, wanted.max_tokens_per_piece or MOST_TOKENS
        if not self.settings.lean:
            return rows
        room = max(tokens // wanted.sequence_length, 1)
        longer = wanted.sequence_length >= self.settings.sequence_length
        return min(rows, room, self._trained if longer else room)

    def _multiples(self, group: str, wanted: Settings) -> Iterator[tuple[int, int]]:
        """Yield what a size may be a multiple of, the least likely by chance first, and what it then becomes."""
        s, w = self.settings, wanted
        length, longer = s.sequence_length, w.sequence_length
        if group == "train":
            own, other = self._trained, self._trained_then(w)
            if self._inner and w.completion_length > TILE_TOKENS:  # the lean trainer then tiles the MLP
                tiled = own * length if s.completion_length <= TILE_TOKENS else min(own * length, TILE_TOKENS)
                yield tiled * self._inner, min(other * longer, TILE_TOKENS) * self._inner
            if self._in_full:
                yield own * length * length, other * longer * longer
            pairs = [(length, longer), (length - 1, longer - 1)]
            pairs += [(s.completion_length, w.completion_length), (s.completion_length + 1, w.completion_length + 1)]
            yield from ((own * a, other * b) for a, b in pairs if a)
            yield from (pairs[:2] if own > 1 else ())
            return
        own, other = _generated_together(s), _generated_together(w)
        if group == "cache":
            yield from ((own * (length - k), other * (longer - k)) for k in _BEFORE_THE_END if length > k)
        yield own, other


def _generated_together(settings: Settings) -> int:
    rows = settings.per_device_train_batch_size * settings.generation_steps
    return min(rows, settings.generation_batch or rows)


def largest_fitting(
    analysis: Analysis, settings: Settings, gpu: Gpu, choices: SizeChoices
) -> Changes | None:
    """Return the most wanted of some changes with which the run, resized, still runs on a card.

    Args:
        analysis, settings: of the simulated run.
        gpu: the card; the margin of a verdict stays free.
        choices: the changes, and what they are changes of.

    Returns:
        None where even the least of them is far from fitting.
    """
    run, room = Resizable(analysis, settings), room_bytes(gpu, margin_kept(analysis))
    base, first, more = Settings.from_dict(choices.of), choices.first, choices.more
    if not first or run.held(base.with_(**first[0])) > _HOPELESS * room:
        return None
    chosen, tried = first[0], None
    for share in _SHARES:

        def holds(changes: Changes, limit: float = share * room) -> bool:
            return run.held(base.with_(**changes)) <= limit

        chosen = _last(first, holds) or first[0]
        chosen = _last([{**chosen, **changes} for changes in more], holds) or chosen
        then = base.with_(**chosen)
        if chosen != tried and all_fit(analysis, gpu, run.resized(then), (then.prompt_length, then.completion_length)):
            break
        tried = chosen
    return chosen


def _last(changes: Sequence[Changes], holds: Callable[[Changes], bool]) -> Changes | None:
    """Return the last that holds, of changes that need more from one to the next; None where the first does not."""
    low, high = 0, len(changes)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if holds(changes[middle]) else (low, middle)
    return changes[low - 1] if low else None
