"""Check a snapshot's ``"memprof"`` key: keep what has the documented types and drop the rest with a note."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from memprof.files import read_toml
from memprof.text import clean_text
from memprof.vocabulary import Category, History, Kind, Phase

SCHEMA = "memprof.snapshot/1"

_MAX_DEPTH = 16
_MAX_VALUES = 20_000_000
#: The highest rank, and the most ranks, that a file may name; ``report.schema.json`` allows as many.
MOST_RANKS = 1 << 17


class _Range(NamedTuple):
    """Allow the whole numbers from ``low`` to ``high``."""

    low: int
    high: int


_Kinds = tuple[type | _Range | frozenset[str], ...]  # a set allows the words in it
_NONE = type(None)
_CATEGORIES = frozenset(str(c) for c in Category)
_KINDS: dict[str, _Kinds] = {
    "text": (str,), "whole": (int,), "number": (int, float), "flag": (bool,), "list": (list,), "record": (dict,),
    "scalar": (str, int, float, bool),
    "bytes": (_Range(0, 1 << 60),), "step": (_Range(-(1 << 31), (1 << 31) - 1),), "rank": (_Range(0, MOST_RANKS),),
    "phase": (frozenset(str(p) for p in Phase),), "history": (frozenset(str(h) for h in History),),
    "switch": (frozenset(("sleep", "wake", "weight_sync")),),
}  # fmt: skip


@cache
def documented() -> dict[str, dict[str, Any]]:
    """Return ``memprof_key.toml`` with tuples of types, ranges and words in the place of its kinds."""

    def read(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: read(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [read(inner) for inner in value]
        return _KINDS[value.rstrip("?")] + ((_NONE,) if value.endswith("?") else ())

    table: dict[str, Any] = read(read_toml(Path(__file__).with_name("memprof_key.toml")))
    return table


def check_extra(value: Any, notes: list[str]) -> dict[str, Any]:
    """Return the usable part of the ``"memprof"`` key; ``notes`` names what was dropped.

    The result is a copy. It is plain and printable, at most 16 levels deep, and shares no objects.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        notes.append("the memprof key is not a dict and was ignored")
        return {}
    kept: dict[str, Any] = {}
    for key, raw in value.items():
        part = clean(raw)
        problem = _problem(key, raw, part)
        if problem:
            notes.append(f"memprof key: {problem}, ignored")
        elif part is not None:
            used, dropped = _usable(key, part)
            if dropped:
                notes.append(f"memprof key: {dropped} entries of {key!r} are not as documented, ignored")
            if used is not None:
                kept[clean_text(key, 40)] = used
    return kept


def _usable(key: str, part: Any) -> tuple[Any, int]:
    """Return a documented part without its entries of a wrong type, and how many of those there were."""
    if (kinds := documented()["records"].get(key)) is not None:
        good = [entry for entry in part if _is_record(entry, kinds)]
        if key in ("counters", "survived"):  # a figure that is left out is one that is not known
            good = [{**dict.fromkeys(kinds), **entry} for entry in good]
        return good, len(part) - len(good)
    if (columns := documented()["rows"].get(key)) is not None:
        good = [entry for entry in part if _is_row(entry, columns)]
        return good, len(part) - len(good)
    if (kinds := documented()["fields"].get(key)) is not None:
        return _fields(key, part, kinds)
    return _inner(key, part)


def fits(value: Any, kinds: _Kinds) -> bool:
    """Tell whether a value is of one of the kinds."""
    if type(value) in kinds:
        return True
    if type(value) is int:
        return any(type(k) is _Range and k.low <= value <= k.high for k in kinds)
    return type(value) is str and any(type(k) is frozenset and value in k for k in kinds)


def _type_of(kind: type | _Range | frozenset[str]) -> type:
    return kind if isinstance(kind, type) else int if isinstance(kind, _Range) else str


def _is_record(entry: Any, kinds: dict[str, _Kinds]) -> bool:
    return type(entry) is dict and all(fits(entry.get(name), allowed) for name, allowed in kinds.items())


def _is_row(entry: Any, kinds: list[_Kinds]) -> bool:
    if type(entry) is not list or len(entry) < sum(_NONE not in allowed for allowed in kinds):
        return False
    return all(fits(value, kinds[min(i, len(kinds) - 1)]) for i, value in enumerate(entry))


def _inner(name: str, part: Any) -> tuple[Any, int]:
    """Return a list or a dict without what is not documented in it, and how much of that there was."""
    good = part
    if name == "thinned":
        good = [row[:2] for row in part if _is_row(row, [(int,), (int,)])]
    elif (kinds := documented()["each"].get(name)) is not None and isinstance(part, dict):
        known = _CATEGORIES if name == "offloaded" else part
        good = {k: v for k, v in part.items() if k in known and fits(v, kinds)}
    elif kinds is not None:
        good = [v for v in part if fits(v, kinds)]
    return good, len(part) - len(good) if isinstance(part, (dict, list)) else 0


def _fields(key: str, part: dict[str, Any], kinds: dict[str, _Kinds]) -> tuple[dict[str, Any] | None, int]:
    # An error's other figures are computed by the report, never read.
    good = {n: v for n, v in part.items() if (fits(v, kinds[n]) if n in kinds else key != "oom")}
    dropped = len(part) - len(good)
    for name in ("thinned", "stack", "offloaded"):
        if isinstance(good.get(name), (list, dict)):
            good[name], wrong = _inner(name, good[name])
            dropped += wrong
    if key == "host" and good.get("offloaded", {}) is None:
        del good["offloaded"]
    complete = all(name in good for name, allowed in kinds.items() if _NONE not in allowed)
    if key == "oom" and complete:  # the report says these of every error
        good = {"device_free_bytes": None, "phase": None, "step": None, **good, "stack": good.get("stack") or []}
    return (good if complete else None), dropped + (not complete)


def _problem(key: Any, raw: Any, part: Any) -> str:
    if not isinstance(key, str):
        return "a name in it is not text"
    name = repr(clean_text(key, 40))
    if part is None:
        return "" if raw is None else f"{name} is not plain data, or is nested too deep"
    wanted = documented()["part"].get(key, (type(part),))
    if type(part) not in [_type_of(kind) for kind in wanted]:  # True is no number
        return f"{name} is not of the documented type"
    if not fits(part, wanted):
        return f"{name} is not a number that it can be"
    if key == "kind" and part not in [str(k) for k in Kind]:
        return f"kind {part[:40]!r} is not known"
    return ""


class _TooMuch(ValueError):
    """Report a value that is too deep, too large or not plain data."""


def clean(value: Any) -> Any:
    """Copy plain data, with printable text and string keys only; return None where it is not plain data."""
    try:
        return _clean(value, _MAX_DEPTH, [_MAX_VALUES])
    except _TooMuch:
        return None


def _clean(value: Any, depth: int, budget: list[int]) -> Any:
    kind = type(value)
    if kind is str:
        return clean_text(value)
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 63 else None
    if value is None or kind is bool:
        return value
    if kind is float:
        return value if math.isfinite(value) else None
    if kind not in (list, tuple, dict) or not depth:
        raise _TooMuch
    budget[0] -= len(value)
    if budget[0] < 0:
        raise _TooMuch
    if kind is dict:
        return {clean_text(k, 200): _clean(v, depth - 1, budget) for k, v in value.items() if isinstance(k, str)}
    return [_clean(v, depth - 1, budget) for v in value]

