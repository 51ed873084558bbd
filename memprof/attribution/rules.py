"""The table of stack rules: reading it, and matching it against every interned stack at once.

Matching costs one pass over distinct frames (each pattern against each distinct file and function
name) and one over the frames of distinct stacks (a bitwise OR), whatever the number of events.
"""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memprof.errors import InputError
from memprof.snapshot.model import Frame, StackTable
from memprof.vocabulary import Category, Phase

__all__ = ["FrameSets", "PhaseRule", "Rule", "RuleSet", "StackIndex", "load_rules"]

LOGPROBS = "logprobs"
SCHEMA = "memprof.rules/1"

_CONDITIONS = ("inner", "any", "all", "none", "outermost", "inside")
_RULE_KEYS = {
    "name", "comment", "tier", "category", "detail", "role", "phases", "alternatives", "example", "example_phase",
    *_CONDITIONS,
}  # fmt: skip
_PHASE_KEYS = {"name", "comment", "phase", "frames", "outermost", "rank", "example"}
_FRAME_KEYS = (
    "module", "linear", "autocast", "checkpoint", "recompute", "library",
    "reward_model", "reference_model", "value_model",
)  # fmt: skip
_CPP_SUFFIXES = (".cpp", ".cc", ".c", ".h", ".hpp", ".cu", ".cuh", ".so", ".pyx", "??")
_NEVER = np.iinfo(np.int32).max

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Rule:
    """One ``[[rule]]`` of the table; see the head of ``rules.toml`` for the meaning of each key."""

    name: str
    category: Category
    detail: str = ""
    role: str = ""
    tier: str = "specific"
    comment: str = ""
    phases: frozenset[str] = frozenset()
    alternatives: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    any: tuple[str, ...] = ()
    all: tuple[str, ...] = ()
    none: tuple[str, ...] = ()
    outermost: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    example: tuple[str, ...] = ()
    example_phase: str = "other"


@dataclass(frozen=True)
class PhaseRule:
    """One ``[[phase]]`` of the table. ``phase`` is a Phase id, or ``logprobs`` (still to be resolved)."""

    name: str
    phase: str
    comment: str = ""
    frames: tuple[str, ...] = ()
    outermost: tuple[str, ...] = ()
    rank: int = 0
    example: tuple[str, ...] = ()


@dataclass(frozen=True)
class FrameSets:
    """Named lists of frame patterns that the stages of attribution ask about."""

    transparent: tuple[str, ...] = ()
    sets: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class RuleSet:
    """Every rule, in the order they are tried."""

    rules: tuple[Rule, ...]
    phases: tuple[PhaseRule, ...]
    frames: FrameSets

    def rule(self, name: str) -> Rule:
        """The rule called ``name``."""
        return next(r for r in self.rules if r.name == name)


# ------------------------------------------------------------------------------------------ loading


def load_rules(extra: Path | None = None) -> RuleSet:
    """The packaged rules, with those of ``extra`` in front; a rule of the same name is replaced.

    Raises:
        InputError: ``extra`` cannot be read, is no TOML, or holds a rule that makes no sense.
    """
    packaged = _packaged()
    if extra is None:
        return packaged
    own = _parse(_read_toml(Path(extra)), str(extra))
    taken = {r.name for r in own.rules} | {p.name for p in own.phases}
    sets = dict(packaged.frames.sets)
    for key, patterns in own.frames.sets.items():
        sets[key] = patterns + sets.get(key, ())
    return RuleSet(
        rules=own.rules + tuple(r for r in packaged.rules if r.name not in taken),
        phases=own.phases + tuple(p for p in packaged.phases if p.name not in taken),
        frames=FrameSets(own.frames.transparent + packaged.frames.transparent, sets),
    )


@lru_cache(maxsize=1)
def _packaged() -> RuleSet:
    return _parse(_read_toml(Path(__file__).with_name("rules.toml")), "rules.toml")


def _read_toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise InputError(f"Cannot read the rules file {path}: {err.strerror or err}.") from err
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise InputError(f"The rules file {path} is not valid TOML: {err}.") from err
    return table


def _parse(table: dict[str, Any], where: str) -> RuleSet:
    known = {"schema", "rule", "phase", "frames", "transparent"}
    if unknown := set(table) - known:
        raise InputError(f"{where}: unknown table {sorted(unknown)[0]!r}; known are {', '.join(sorted(known))}.")
    if table.get("schema", SCHEMA) != SCHEMA:
        raise InputError(f"{where}: schema {table['schema']!r} is not supported; this version reads {SCHEMA}.")
    rules = tuple(_rule(entry, where) for entry in _entries(table, "rule", where))
    phases = tuple(_phase(entry, where) for entry in _entries(table, "phase", where))
    names = [r.name for r in rules] + [p.name for p in phases]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise InputError(f"{where}: the rule name {twice!r} is used twice.")
    frames = table.get("frames", {})
    if not isinstance(frames, dict) or set(frames) - set(_FRAME_KEYS):
        raise InputError(f"{where}: [frames] may hold {', '.join(_FRAME_KEYS)} only.")
    sets = {key: _patterns(value, f"{where}: frames.{key}") for key, value in frames.items()}
    transparent = _patterns(table.get("transparent", {}).get("frames", []), f"{where}: transparent.frames")
    return RuleSet(rules, phases, FrameSets(transparent, sets))


def _entries(table: dict[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    entries = table.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise InputError(f"{where}: write each {key} under [[{key}]].")
    return entries


def _rule(entry: dict[str, Any], where: str) -> Rule:
    name = _name(entry, _RULE_KEYS, where)
    at = f"{where}: rule {name!r}"
    category = _one_of(entry.get("category"), [c.value for c in Category], f"{at}: category")
    phases = _strings(entry.get("phases", []), f"{at}: phases")
    for phase in phases:
        _one_of(phase, [p.value for p in Phase], f"{at}: phases")
    tier = _one_of(entry.get("tier", "specific"), ["specific", "context"], f"{at}: tier")
    alternatives = _strings(entry.get("alternatives", []), f"{at}: alternatives")
    for other in alternatives:
        _one_of(other, [c.value for c in Category], f"{at}: alternatives")
    conditions = {key: _patterns(entry[key], f"{at}: {key}") for key in _CONDITIONS if key in entry}
    if len(conditions.get("inside", ("", ""))) != 2:
        raise InputError(f"{at}: inside takes two patterns, [called, caller].")
    if not conditions and not phases:
        raise InputError(f"{at}: it has no condition, so it would hold for every allocation.")
    return Rule(
        name=name, category=Category(category), detail=str(entry.get("detail", "")), role=str(entry.get("role", "")),
        tier=tier, comment=str(entry.get("comment", "")), phases=frozenset(phases), alternatives=tuple(alternatives),
        example=tuple(_strings(entry.get("example", []), f"{at}: example")),
        example_phase=str(entry.get("example_phase", "other")), **conditions,
    )  # fmt: skip


def _phase(entry: dict[str, Any], where: str) -> PhaseRule:
    name = _name(entry, _PHASE_KEYS, where)
    at = f"{where}: phase {name!r}"
    phase = _one_of(entry.get("phase"), [*(p.value for p in Phase), LOGPROBS], f"{at}: phase")
    frames = _patterns(entry.get("frames", []), f"{at}: frames")
    outermost = _patterns(entry.get("outermost", []), f"{at}: outermost")
    if not frames and not outermost:
        raise InputError(f"{at}: give frames or outermost.")
    rank = entry.get("rank", 0)
    if not isinstance(rank, int) or not 0 <= rank <= 9:
        raise InputError(f"{at}: rank is a number from 0 to 9.")
    example = tuple(_strings(entry.get("example", []), f"{at}: example"))
    return PhaseRule(name, phase, str(entry.get("comment", "")), frames, outermost, rank, example)


def _name(entry: dict[str, Any], known: set[str], where: str) -> str:
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise InputError(f"{where}: every rule needs a name.")
    if unknown := set(entry) - known:
        raise InputError(f"{where}: rule {name!r} has the unknown key {sorted(unknown)[0]!r}.")
    return name


def _one_of(value: object, allowed: list[str], where: str) -> str:
    if value not in allowed:
        raise InputError(f"{where}: {value!r} is none of {', '.join(allowed)}.")
    return str(value)


def _strings(value: object, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise InputError(f"{where}: write a list of strings.")
    return value


def _patterns(value: object, where: str) -> tuple[str, ...]:
    patterns = _strings(value, where)
    for pattern in patterns:
        if ":" not in pattern:
            raise InputError(f"{where}: {pattern!r} is no pattern; write FILE:FUNCTION, such as '*:generate'.")
    return tuple(patterns)


# ----------------------------------------------------------------------------------------- matching


class _FrameMatcher:
    """Which of a file's distinct frames each pattern matches; every part is matched once."""

    def __init__(self, frames: list[Frame]) -> None:
        self.files, self._file_of = _intern(f.file.replace("\\", "/") for f in frames)
        self.functions, self._function_of = _intern(f.function for f in frames)
        self._function_ids = {name: i for i, name in enumerate(self.functions)}
        self._file_hits: dict[str, Bools] = {}
        self._function_hits: dict[str, Bools] = {}

    def matches(self, patterns: Iterable[str]) -> Bools:
        """Frames that match any of ``patterns``."""
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
            regex = re.compile("(?:.*/)?" + fnmatch.translate(glob))
            self._file_hits[glob] = np.fromiter((regex.match(f) is not None for f in self.files), bool, len(self.files))
        return self._file_hits[glob]

    def _functions(self, alternatives: str) -> Bools:
        if alternatives not in self._function_hits:
            hits = np.zeros(len(self.functions), bool)
            for glob in alternatives.split("|"):
                if "*" not in glob:
                    if (found := self._function_ids.get(glob)) is not None:
                        hits[found] = True
                    continue
                regex = re.compile(fnmatch.translate(glob))
                hits |= np.fromiter((regex.match(f) is not None for f in self.functions), bool, len(hits))
            self._function_hits[alternatives] = hits
        return self._function_hits[alternatives]


def _intern(texts: Iterable[str]) -> tuple[list[str], NDArray[np.int64]]:
    ids: dict[str, int] = {}
    codes = [ids.setdefault(text, len(ids)) for text in texts]
    return list(ids), np.asarray(codes, np.int64)


def _is_python(frame: Frame) -> bool:
    """Whether the frame is Python's. Snapshots mix in C++ frames, often without a file."""
    file, function = frame.file, frame.function
    if file.endswith((".py", ".pyc", ".ipynb")) or (file.startswith("<") and "::" not in function):
        return True
    return bool(file) and not file.endswith(_CPP_SUFFIXES) and "::" not in function and not function.startswith("_Z")


class StackIndex:
    """What every stack of a snapshot says, one entry a stack. Frames are numbered from the innermost."""

    def __init__(self, table: StackTable, rules: RuleSet) -> None:
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
        self._matcher = _FrameMatcher(frames)
        self.python = np.fromiter((_is_python(f) for f in frames), bool, len(frames))
        self.python[blank] = False
        self.has_python = self._any(self.python)
        self.all_python = ~self._any(~self.python)
        telling = self.python & ~self._matcher.matches(rules.frames.transparent)
        self._inner = self._frame_at(self._first(telling))
        self._outermost = self._frame_at(self._last(self.python))

    # Frames to stacks. -1 stands for "no such frame".

    def _any(self, frame_hits: Bools) -> Bools:
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
        """How many frames of each stack match."""
        if not self.n:
            return np.zeros(0, np.int64)
        return np.add.reduceat(self._matcher.matches(patterns)[self._flat].astype(np.int64), self._starts)

    def _frame_at(self, depth: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.where(depth < 0, -1, self._flat[self._starts + np.maximum(depth, 0)]) if self.n else depth

    def any_of(self, name: str) -> Bools:
        """Stacks with a frame of the named set (``[frames]`` in the rules)."""
        return self._any(self._matcher.matches(self.rules.frames.sets.get(name, ())))

    def inner_in(self, name: str) -> Bools:
        """Stacks whose innermost telling frame is in the named set."""
        hits = self._matcher.matches(self.rules.frames.sets.get(name, ()))
        return (self._inner >= 0) & hits[self._inner]

    @property
    def inner(self) -> NDArray[np.int64]:
        """The innermost telling frame's id, -1 where there is none."""
        return self._inner

    def caller_key(self, name: str = "library") -> NDArray[np.int64]:
        """A number that stacks share when they agree on every Python frame outside the named set."""
        inside = ~self.python | self._matcher.matches(self.rules.frames.sets.get(name, ()))
        keys: dict[tuple[int, ...], int] = {}
        out = np.zeros(self.n, np.int64)
        for i, stack in enumerate(self.table.stacks):
            out[i] = keys.setdefault(tuple(f for f in stack if not inside[f]), len(keys))
        return out

    def python_key(self) -> NDArray[np.int64]:
        """A number that stacks share when they agree on every Python frame, whatever C++ lies between."""
        if self.python[: len(self.table.frames)].all():
            return np.arange(self.n)
        keys: dict[tuple[int, ...], int] = {}
        python = self.python.tolist()
        pure = (tuple([f for f in stack if python[f]]) for stack in self.table.stacks)
        return np.fromiter((keys.setdefault(key, len(keys)) for key in pure), np.int64, self.n)

    # Rules.

    def holds(self, rule: Rule) -> Bools:
        """Stacks on which the rule's frame conditions hold (its phases are the caller's business)."""
        ok = np.ones(self.n, bool)
        if rule.any:
            ok &= self._any(self._matcher.matches(rule.any))
        for pattern in rule.all:
            ok &= self._any(self._matcher.matches((pattern,)))
        if rule.none:
            ok &= ~self._any(self._matcher.matches(rule.none))
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
        """For each (stack, phase code) pair the index of the first rule of ``tier`` that holds, else -1."""
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
        """For each stack the index of the phase rule that decides, -1 for none."""
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

    def call_site(self, patterns: tuple[str, ...]) -> NDArray[np.int64]:
        """The frame that called the outermost frame matching ``patterns``, transparent ones skipped; -1 for none."""
        hits = self._matcher.matches(patterns)
        telling = self.python & ~self._matcher.matches(self.rules.frames.transparent)
        out = np.full(self.n, -1, np.int64)
        for i in np.flatnonzero(self._any(hits)):
            stack = self.table.stacks[i]
            last = max(k for k, f in enumerate(stack) if hits[f])
            out[i] = next((f for f in stack[last + 1 :] if telling[f]), -1)
        return out

    def caller_path(self, patterns: tuple[str, ...]) -> tuple[NDArray[np.int64], list[str]]:
        """A number for all the frames that called the outermost match (-1 without one), and for each number the
        file and function of the nearest of them."""
        hits = self._matcher.matches(patterns)
        telling = self.python & ~self._matcher.matches(self.rules.frames.transparent)
        ids: dict[tuple[int, ...], int] = {}
        out = np.full(self.n, -1, np.int64)
        for i in np.flatnonzero(self._any(hits)):
            stack = self.table.stacks[i]
            last = max(k for k, f in enumerate(stack) if hits[f])
            path = tuple(f for f in stack[last + 1 :] if telling[f])
            out[i] = ids.setdefault(path, len(ids)) if path else -1
        frames = self.table.frames
        return out, [f"{frames[path[0]].file}:{frames[path[0]].function}" for path in ids]

    def with_function(self, function: str) -> Bools:
        """Stacks with a frame in this ``file:function``, at any line."""
        hits = np.array([f"{f.file}:{f.function}" == function for f in self.table.frames] + [False], bool)
        return self._any(hits)

    def frames_matching(self, patterns: tuple[str, ...]) -> Bools:
        """Frame ids that match any of ``patterns``."""
        return self._matcher.matches(patterns)
