"""Match rules against every interned stack at once.

Matching takes one pass over distinct frames (each pattern against each distinct file and function name) and
one over the frames of distinct stacks (a bitwise OR). The number of events does not matter.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memprof.attribution.rules import Rule, RuleSet, file_test, function_names
from memprof.frame_paths import OwnFolder, frame_path
from memprof.snapshot.model import Frame, StackTable
from memprof.vocabulary import Phase

_CPP_SUFFIXES = (".cpp", ".cc", ".c", ".h", ".hpp", ".cu", ".cuh", ".so", ".pyx", "??")
_CONSTRUCTORS = ("__init__", "init_weights", "_init_weights", "__post_init__")
_NEVER = np.iinfo(np.int32).max

Bools = NDArray[np.bool_]


class _FrameMatcher:
    """Match patterns against the distinct frames of a snapshot; every file and function is matched once."""

    def __init__(self, frames: list[Frame], own: Sequence[OwnFolder]) -> None:
        files, self._file_of = _intern(f.file for f in frames)
        self.files = [frame_path(file, own) for file in files]
        self.functions, self._function_of = _intern(f.function for f in frames)
        self._function_ids = {name: i for i, name in enumerate(self.functions)}
        self._file_hits = _hits_of(tuple(self.files))
        self._function_hits = _hits_of(tuple(self.functions))

    def matches(self, patterns: Iterable[str]) -> Bools:
        """Flag the frames that match any of ``patterns``."""
        hits = np.zeros(len(self._file_of), bool)
        for pattern in patterns:
            file, _, function = pattern.partition(":")
            hit = np.ones(len(hits), bool) if file == "*" else self._files(file)[self._file_of]
            if function != "*":
                hit = hit & self._functions(function)[self._function_of]
            hits |= hit
        return hits

    def _files(self, glob: str) -> Bools:
        if glob not in self._file_hits:
            matches = file_test(glob)
            self._file_hits[glob] = np.fromiter((matches(f) for f in self.files), bool, len(self.files))
        return self._file_hits[glob]

    def _functions(self, alternatives: str) -> Bools:
        if alternatives not in self._function_hits:
            names = function_names(alternatives)
            hits = np.zeros(len(self.functions), bool)
            hits[[self._function_ids[name] for name in names.exact if name in self._function_ids]] = True
            for fits in names.globs:
                hits |= np.fromiter(map(fits, self.functions), bool, len(hits))
            self._function_hits[alternatives] = hits
        return self._function_hits[alternatives]


@lru_cache(maxsize=16)
def _hits_of(names: tuple[Hashable, ...]) -> dict[str, Bools]:
    """Return what is known of these names by pattern; the ranks of a run have the same names."""
    return {}


def _intern(texts: Iterable[str]) -> tuple[list[str], NDArray[np.int64]]:
    ids: dict[str, int] = {}
    codes = [ids.setdefault(text, len(ids)) for text in texts]
    return list(ids), np.asarray(codes, np.int64)


def _is_python(frame: Frame) -> bool:
    """Tell whether the frame is Python's; snapshots also hold C++ frames, often without a file."""
    file, function = frame.file, frame.function
    if file.endswith((".py", ".pyc", ".ipynb")) or (file.startswith("<") and "::" not in function):
        return True
    return bool(file) and not file.endswith(_CPP_SUFFIXES) and "::" not in function and not function.startswith("_Z")


class StackIndex:
    """Answer questions about all stacks of a snapshot at once; results have one entry per stack.

    Frames are numbered from the innermost. ``own`` are the folders of the memprof that recorded.
    """

    def __init__(self, table: StackTable, rules: RuleSet, own: Sequence[OwnFolder] = ()) -> None:
        self.rules = rules
        self.table = table
        # One frame that matches nothing stands in for the frames of an empty stack.
        frames = [*table.frames, Frame("??", 0, "")]
        blank = len(table.frames)
        stacks = [s if s else (blank,) for s in table.stacks]
        lengths = np.fromiter((len(s) for s in stacks), np.int64, len(stacks))
        self.n = len(stacks)
        self.empty = np.fromiter((not s for s in table.stacks), bool, self.n)
        self._starts = np.concatenate(([0], np.cumsum(lengths)[:-1])) if self.n else np.zeros(0, np.int64)
        self._flat = np.fromiter((f for s in stacks for f in s), np.int64, int(lengths.sum()))
        self._depth = np.arange(len(self._flat)) - np.repeat(self._starts, lengths)
        self._matcher = _FrameMatcher(frames, own)
        self.python = np.fromiter((_is_python(f) for f in frames), bool, len(frames))
        self.python[blank] = False
        self.has_python = self.having(self.python)
        self.all_python = ~self.having(~self.python)
        #: Flags, by frame id, of Python frames that are not transparent; call sites are told apart by these.
        self.telling = self.python & ~self._matcher.matches(rules.transparent)
        self._inner = self._frame_at(self._first(self.telling))
        self._outermost = self._frame_at(self._last(self.python))

    def frames_matching(self, patterns: Iterable[str]) -> Bools:
        """Tell for each frame id whether it matches any of ``patterns``."""
        return self._matcher.matches(patterns)

    # From frames to stacks; -1 means "no such frame".

    def having(self, frame_hits: Bools) -> Bools:
        """Tell for each stack whether one of its frames is hit (``frame_hits``: by frame id)."""
        if not self.n:
            return np.zeros(0, bool)
        return np.logical_or.reduceat(frame_hits[self._flat], self._starts)

    def _first(self, frame_hits: Bools) -> NDArray[np.int64]:
        if not self.n:
            return np.zeros(0, np.int64)
        depth = np.where(frame_hits[self._flat], self._depth, _NEVER)
        first = np.minimum.reduceat(depth, self._starts)
        return np.where(first == _NEVER, -1, first)

    def _last(self, frame_hits: Bools) -> NDArray[np.int64]:
        if not self.n:
            return np.zeros(0, np.int64)
        return np.maximum.reduceat(np.where(frame_hits[self._flat], self._depth, -1), self._starts)

    def count(self, patterns: Iterable[str]) -> NDArray[np.int64]:
        """Count the frames of each stack that match."""
        if not self.n:
            return np.zeros(0, np.int64)
        return np.add.reduceat(self._matcher.matches(patterns)[self._flat].astype(np.int64), self._starts)

    def _frame_at(self, depth: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.where(depth < 0, -1, self._flat[self._starts + np.maximum(depth, 0)]) if self.n else depth

    def any_of(self, name: str) -> Bools:
        """Flag the stacks with a frame of the named set (``[frames]`` in the rules)."""
        return self.having(self._matcher.matches(self.rules.sets.get(name, ())))

    def inner_in(self, name: str) -> Bools:
        """Flag the stacks whose innermost non-transparent frame is in the named set."""
        hits = self._matcher.matches(self.rules.sets.get(name, ()))
        return (self._inner >= 0) & hits[self._inner]

    @property
    def inner(self) -> NDArray[np.int64]:
        """Return the id of the innermost non-transparent frame; -1 where there is none."""
        return self._inner

    def builder_keys(self, name: str = "library") -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Number the stacks by their Python frames outside the named set.

        Returns:
            A number for each stack by the frames that called the outermost constructor of the innermost chain of
            constructors, and one by those with that constructor's line. Stacks without constructors are numbered by
            all their frames in both.
        """
        inside = ~self.python | self._matcher.matches(self.rules.sets.get(name, ()))
        keys: dict[tuple[int, ...], int] = {}
        outer, inner = np.zeros(self.n, np.int64), np.zeros(self.n, np.int64)
        for i, stack in enumerate(self.table.stacks):
            frames = tuple(f for f in stack if not inside[f])
            built = next((k for k, f in enumerate(frames) if not self._constructs(f)), len(frames))
            outer[i] = keys.setdefault(frames[built:], len(keys))
            inner[i] = keys.setdefault(frames[max(built - 1, 0) :], len(keys))
        return outer, inner

    def _constructs(self, frame: int) -> bool:
        function = self.table.frames[frame].function
        return function in _CONSTRUCTORS or function.startswith("<listcomp") or function.startswith("<genexpr")

    def python_key(self) -> NDArray[np.int64]:
        """Number the stacks so that those with equal Python frames share a number, whatever their C++ frames."""
        if self.python[: len(self.table.frames)].all():
            return np.arange(self.n)
        keys: dict[tuple[int, ...], int] = {}
        python = self.python.tolist()
        pure = (tuple([f for f in stack if python[f]]) for stack in self.table.stacks)
        return np.fromiter((keys.setdefault(key, len(keys)) for key in pure), np.int64, self.n)

    # Rules.

    def holds(self, rule: Rule) -> Bools:
        """Flag the stacks on which the rule's frame conditions hold; the caller checks the phases."""
        ok = np.ones(self.n, bool)
        if rule.any:
            ok &= self.having(self._matcher.matches(rule.any))
        for pattern in rule.all:
            ok &= self.having(self._matcher.matches((pattern,)))
        if rule.none:
            ok &= ~self.having(self._matcher.matches(rule.none))
        if rule.inner:
            ok &= (self._inner >= 0) & self._matcher.matches(rule.inner)[self._inner]
        if rule.outermost:
            ok &= (self._outermost >= 0) & self._matcher.matches(rule.outermost)[self._outermost]
        if rule.inside:
            called = self._first(self._matcher.matches(rule.inside[:1]))
            caller = self._last(self._matcher.matches(rule.inside[1:]))
            ok &= (called >= 0) & (caller > called)
        return ok

    def first_rule(
        self, tier: str, stack: NDArray[np.integer[Any]], phase: NDArray[np.integer[Any]]
    ) -> NDArray[np.int64]:
        """Return for each (stack, phase code) pair the index of the first rule of ``tier`` that holds, else -1."""
        codes = {p.value: p.code for p in Phase}
        answer = np.full(len(stack), -1, np.int64)
        for i, rule in enumerate(self.rules.rules):
            if rule.tier != tier:
                continue
            open_ = answer < 0
            ok = open_ & self.holds(rule)[stack]
            if rule.phases:
                ok &= np.isin(phase, [codes[p] for p in rule.phases])
            answer[ok] = i
        return answer

    def phase_rule(self) -> NDArray[np.int64]:
        """Return for each stack the index of the phase rule that decides; -1 for none."""
        answer = np.full(self.n, -1, np.int64)
        for rank in sorted({rule.rank for rule in self.rules.phases}):
            of_frame = np.full(len(self.python), -1, np.int64)
            said = np.full(self.n, -1, np.int64)
            for i, rule in enumerate(self.rules.phases):
                if rule.rank == rank and rule.frames:
                    of_frame[(of_frame < 0) & self._matcher.matches(rule.frames)] = i
            frame = self._frame_at(self._first(of_frame >= 0))
            said[:] = np.where(frame >= 0, of_frame[frame], -1)
            for i, rule in enumerate(self.rules.phases):
                if rule.rank == rank and rule.outermost:
                    said[(self._outermost >= 0) & self._matcher.matches(rule.outermost)[self._outermost]] = i
            answer = np.where(answer < 0, said, answer)
        return answer


def named_frame(stacks: StackIndex) -> NDArray[np.int64]:
    """Return for each stack its innermost non-transparent frame that is no comprehension; -1 where there is none."""
    frames, telling = stacks.table.frames, stacks.telling
    out = np.full(stacks.n, -1, np.int64)
    for number, stack in enumerate(stacks.table.stacks):
        inner = [f for f in stack if telling[f]]
        out[number] = next((f for f in inner if not frames[f].function.startswith("<")), inner[0] if inner else -1)
    return out
