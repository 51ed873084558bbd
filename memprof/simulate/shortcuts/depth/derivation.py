"""Fit how a run's program grows with the number of layers, check the fit on a third depth, and extend it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from memprof.simulate.shortcuts.depth.program import Call, Entry, Free, OwnerAssignment, ProgramAllocation
from memprof.simulate.shortcuts.depth.stream import (
    AllocationKey,
    FreeKey,
    Keys,
    Live,
    NotAffine,
    Token,
    affine_key,
    aligned,
    with_layer,
)  # fmt: skip


class _Step(NamedTuple):
    """A token of the derived programs. ``key`` and ``next_key``: of the first two depths; ``layer``, ``by_copy`` and
    ``by_depth``: its layer's number, and what that grows by from copy to copy and from depth to depth; ``newest``: the
    block is found by how many newer ones there are, else by how many older."""

    key: int
    next_key: int
    layer: int
    by_copy: int
    by_depth: int
    pool: int
    newest: bool
    rank: int


@dataclass(frozen=True)
class ProgramGrowth:
    """How programs grow: runs of steps, each made once, or once more with every period of layers."""

    runs: list[tuple[bool, list[_Step]]]
    keys: Keys

    def program(self, repeats: int) -> list[Entry]:
        """Return the program of a model that has ``repeats`` periods more than the first.

        Raises:
            NotAffine: a block that it needs is not there.
        """
        live, entries = Live(), []
        for is_repeated, steps in self.runs:
            for copy in range(repeats) if is_repeated else (0,):
                for step in steps:
                    entries.append(self._entry(step, copy, repeats, live))
        return entries

    def _entry(self, step: _Step, copy: int, repeats: int, live: Live) -> Entry:
        number = step.key if step.key == step.next_key else affine_key(step.key, step.next_key, repeats, self.keys)
        key = self.keys.keys[number]
        if isinstance(key, Call):
            return key
        layer = step.layer + copy * step.by_copy + repeats * step.by_depth
        if isinstance(key, AllocationKey):
            live.add(number)
            return ProgramAllocation(key.nbytes, key.stream, with_layer(key.tag, layer), self.keys.stacks[key.stack])
        numbers = live.pools[step.pool].get(key.of, [])
        place = len(numbers) - 1 - step.rank if step.newest else step.rank
        if not 0 <= place < len(numbers):
            raise NotAffine("a block is not there")
        block = numbers[place]
        live.remove(block, 1)
        if isinstance(key, FreeKey):
            live.remove(block, 0)
            return Free(block)
        name = None if key.name is None else with_layer(key.name, layer)
        return OwnerAssignment(block, key.category, key.detail, name)


def fit(streams: Sequence[Sequence[Token]], keys: Keys, shallow: Sequence[int], period: int) -> ProgramGrowth:
    """Align the first two streams, and derive the third from them, token by token. ``shallow``: their depths.

    Raises:
        NotAffine: the third is not what follows from the first two.
    """
    first, second, third = streams
    pairs = aligned(first, second, keys, (shallow[0] - 1, shallow[1] - 1))
    runs: list[tuple[bool, list[_Step]]] = []
    at = 0
    for is_new, group in groupby(pairs, key=lambda pair: pair[0] < 0):
        run = list(group)
        times = 2 if is_new else 1
        if at + times * len(run) > len(third):
            raise NotAffine("the third depth has fewer events")
        if not is_new:
            runs.append((False, [_aligned(first[i], second[j], third[at + k], keys) for k, (i, j) in enumerate(run)]))
        else:
            added, twice = [second[j] for _, j in run], third[at : at + 2 * len(run)]
            runs += [(True, steps) for steps in _loops(added, twice, period)]
        at += times * len(run)
    if at != len(third):
        raise NotAffine("the third depth has more events")
    return ProgramGrowth(runs, keys)


def _loops(added: Sequence[Token], twice: Sequence[Token], period: int) -> list[list[_Step]]:
    """Return the steps of the loops that stand next to one another in ``added``: the third depth has each body twice.

    There is one loop, or as few as explain the third depth.
    """
    keys, copies = [token.key for token in added], [token.key for token in twice]
    before: dict[int, int] = {0: 0}  # where a body ends -> where it begins
    waiting = [0]
    for start in waiting:  # the fewest bodies first: it grows meanwhile
        if len(keys) in before:
            break
        for end in range(len(keys), start, -1):
            length = end - start
            second = 2 * start + length
            body = keys[start:end]
            if end not in before and copies[second] == keys[start] and (
                copies[2 * start : second] == body == copies[second : second + length]
            ):  # fmt: skip
                before[end] = start
                waiting.append(end)
    if len(keys) not in before:
        raise NotAffine("the layers differ")
    bodies = []
    end = len(keys)
    while end:
        start = before[end]
        copies_of = zip(added[start:end], twice[2 * start : start + end], twice[start + end : 2 * end], strict=True)
        bodies.append([_inserted(*copies, period) for copies in copies_of])
        end = start
    return bodies[::-1]


def _aligned(a: Token, b: Token, c: Token, keys: Keys) -> _Step:
    """Return the step of a token that every depth has once."""
    if affine_key(a.key, b.key, 2, keys) != c.key or c.layer - b.layer != b.layer - a.layer:
        raise NotAffine(f"{keys.keys[c.key]} does not follow from {keys.keys[a.key]}")
    newest, rank = _rank(a, b, c)
    return _Step(a.key, b.key, a.layer, 0, b.layer - a.layer, a.pool, newest, rank)


def _inserted(b: Token, c: Token, d: Token, period: int) -> _Step:
    """Return the step of a token that each period of layers adds; ``c`` and ``d`` are its two copies."""
    if not b.key == c.key == d.key:
        raise NotAffine("the layers differ")
    by_copy, by_depth = d.layer - c.layer, c.layer - b.layer
    if (by_copy, by_depth) not in ((0, 0), (period, 0), (-period, period)):
        raise NotAffine("the layers are in another order")
    newest, rank = _rank(b, c, d)
    return _Step(b.key, b.key, b.layer - by_depth, by_copy, by_depth, b.pool, newest, rank)


def _rank(*tokens: Token) -> tuple[bool, int]:
    """Return whether a block is found by how many newer ones there are, and that number, or that of older ones."""
    if len({token.pool for token in tokens}) > 1:
        raise NotAffine("a block has an owner at one depth alone")
    for newest, ranks in ((True, {t.newest for t in tokens}), (False, {t.oldest for t in tokens})):
        if len(ranks) == 1:
            return newest, ranks.pop()
    raise NotAffine("which block is freed changes with the depth")
