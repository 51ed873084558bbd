"""Define stack rules and read their table; :mod:`memprof.attribution.stack_index` matches them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from memprof.errors import InputError
from memprof.files import read_toml, refuse_special
from memprof.frame_paths import FramePath, package_names
from memprof.vocabulary import Category, Phase

LOGPROBS = "logprobs"
SCHEMA = "memprof.rules/1"

_CONDITIONS = ("inner", "any", "all", "none", "outermost", "inside")
_FRAME_KEYS = (
    "module", "linear", "autocast", "checkpoint", "recompute", "library",
    "reward_model", "reference_model", "value_model",
)  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """Hold one ``[[rule]]`` of the table; the head of ``rules.toml`` explains each key."""

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
    """Hold one ``[[phase]]`` of the table. ``phase`` is a Phase id, or ``logprobs`` (decided later by call site)."""

    name: str
    phase: str
    comment: str = ""
    frames: tuple[str, ...] = ()
    outermost: tuple[str, ...] = ()
    rank: int = 0
    example: tuple[str, ...] = ()


@dataclass(frozen=True)
class RuleSet:
    """Hold every rule, in the order they are tried, and the named lists of frame patterns that attribution uses."""

    rules: tuple[Rule, ...]
    phases: tuple[PhaseRule, ...]
    transparent: tuple[str, ...]
    sets: dict[str, tuple[str, ...]]

    def rule(self, name: str) -> Rule:
        """Return the rule called ``name``."""
        return next(r for r in self.rules if r.name == name)


# ------------------------------------------------------------------------------------------ loading


def load_rules(extra: Path | None = None) -> RuleSet:
    """Read the packaged rules, with those of the file ``extra`` in front; a rule of the same name is replaced.

    Raises:
        InputError: ``extra`` cannot be read, is not TOML, or holds a rule that makes no sense.
    """
    packaged = _packaged()
    if extra is None:
        return packaged
    own = _parse(_read_toml(Path(extra)), str(extra))
    taken = {r.name for r in own.rules} | {p.name for p in own.phases}
    sets = dict(packaged.sets)
    for key, patterns in own.sets.items():
        sets[key] = patterns + sets.get(key, ())
    return RuleSet(
        rules=own.rules + tuple(r for r in packaged.rules if r.name not in taken),
        phases=own.phases + tuple(p for p in packaged.phases if p.name not in taken),
        transparent=own.transparent + packaged.transparent,
        sets=sets,
    )


@lru_cache(maxsize=1)
def _packaged() -> RuleSet:
    return _parse(_read_toml(Path(__file__).with_name("rules.toml")), "rules.toml")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        refuse_special(path)
        return read_toml(path)
    except OSError as err:
        raise InputError(f"Cannot read the rules file {path}: {err.strerror or err}.") from err
    except ValueError as err:
        raise InputError(f"The rules file {path} is not valid TOML: {err}.") from err


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
    return RuleSet(rules, phases, transparent, sets)


def _entries(table: dict[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    entries = table.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise InputError(f"{where}: write each {key} under [[{key}]].")
    return entries


def _rule(entry: dict[str, Any], where: str) -> Rule:
    name = _name(entry, Rule, where)
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
        raise InputError(f"{at}: inside requires two patterns, [called, caller].")
    if not conditions and not phases:
        raise InputError(f"{at}: it has no condition, so it would match every allocation.")
    return Rule(
        name=name, category=Category(category), detail=str(entry.get("detail", "")), role=str(entry.get("role", "")),
        tier=tier, comment=str(entry.get("comment", "")), phases=frozenset(phases), alternatives=tuple(alternatives),
        example=tuple(_strings(entry.get("example", []), f"{at}: example")),
        example_phase=str(entry.get("example_phase", "other")), **conditions,
    )  # fmt: skip


def _phase(entry: dict[str, Any], where: str) -> PhaseRule:
    name = _name(entry, PhaseRule, where)
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


def _name(entry: dict[str, Any], kind: type[Rule | PhaseRule], where: str) -> str:
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise InputError(f"{where}: every rule needs a name.")
    if unknown := set(entry) - {key.name for key in fields(kind)}:
        raise InputError(f"{where}: rule {name!r} has the unknown key {sorted(unknown)[0]!r}.")
    return name


def _one_of(value: object, allowed: list[str], where: str) -> str:
    if value not in allowed:
        raise InputError(f"{where}: {value!r} is not one of {', '.join(allowed)}.")
    return str(value)


def _strings(value: object, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise InputError(f"{where}: write a list of strings.")
    return value


def _patterns(value: object, where: str) -> tuple[str, ...]:
    patterns = _strings(value, where)
    for pattern in patterns:
        if ":" not in pattern:
            raise InputError(f"{where}: {pattern!r} is not a pattern; write FILE:FUNCTION, such as '*:generate'.")
    return tuple(patterns)


@dataclass(frozen=True)
class FunctionNames:
    """Hold the FUNCTION part of a pattern, plain names and globs; :func:`function_names` makes it.

    ``*`` alone, which every function fits, has neither: callers check for it first.
    """

    exact: frozenset[str]
    globs: tuple[Callable[[str], bool], ...]

    def fits(self, function: str) -> bool:
        """Tell whether a function's name fits."""
        return function in self.exact or any(fits(function) for fits in self.globs)


@cache
def function_names(alternatives: str) -> FunctionNames:
    """Read ``forward|_call_*``, the FUNCTION part of a pattern; the head of ``rules.toml`` explains it."""
    names = alternatives.split("|")
    globs = tuple(_glob_test(name) for name in names if "*" in name)
    return FunctionNames(frozenset(name for name in names if "*" not in name), globs)


@cache
def file_test(glob: str) -> Callable[[FramePath], bool]:
    """Return a test of paths against the FILE part of a pattern; the head of ``rules.toml`` explains it."""
    first, slash, _ = glob.partition("/")
    whole = _glob_test(glob)
    if not slash:
        return lambda f: whole(f.path.rpartition("/")[2])
    if first in package_names():
        return lambda f: f.rooted and whole(f.path)
    below = _glob_test("*/" + glob)
    return lambda f: whole(f.path) or below(f.path)


def _glob_test(glob: str) -> Callable[[str], bool]:
    """Return a test of texts against a glob; one with a star at an end alone needs no regular expression."""
    inner = glob.strip("*")
    if not any(c in inner for c in "*?["):
        before, after = glob[:1] == "*", glob[-1:] == "*"
        if before and after:
            return lambda text: inner in text
        if before:
            return lambda text: text.endswith(inner)
        return lambda text: text.startswith(inner) if after else text == inner
    match = re.compile(fnmatch.translate(glob)).match
    return lambda text: match(text) is not None
