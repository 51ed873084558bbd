"""The ``"memprof"`` key: kept where it has the documented types, dropped with a note where not."""

from __future__ import annotations

import math
from typing import Any

from memprof.vocabulary import History, Kind

__all__ = ["SCHEMA", "check_extra", "clean", "clean_text"]

SCHEMA = "memprof.snapshot/1"

_INT = (int,)
_TYPES: dict[str, tuple[type, ...]] = {
    "schema": (str,),
    "kind": (str,),
    "versions": (dict,),
    "device": (dict,),
    "rank": _INT,
    "world_size": _INT,
    "created": (str,),
    "config": (dict,),
    "recorded": (dict,),
    "phases": (list,),
    "steps": (list,),
    "owners": (list,),
    "counters": (list,),
    "samples": (list,),
    "host": (dict,),
    "oom": (dict,),
    "non_torch_bytes": _INT,
    "overhead": (dict,),
    "notes": (list,),
}


_MAX_DEPTH = 16
_MAX_VALUES = 20_000_000


def check_extra(value: Any, notes: list[str]) -> dict[str, Any]:
    """The part of the ``"memprof"`` key that can be used; what cannot is named in ``notes``.

    The result is a copy: plain, printable, at most 16 levels deep and without anything shared.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        notes.append("the memprof key is no dict and was ignored")
        return {}
    kept: dict[str, Any] = {}
    for key, raw in value.items():
        part = clean(raw)
        problem = _problem(key, raw, part)
        if problem:
            notes.append(f"memprof key: {problem}, ignored")
        elif part is not None:
            kept[clean_text(key, 40)] = part
    recorded = kept.get("recorded", {}).get("history")
    if recorded is not None and recorded not in [str(h) for h in History]:
        notes.append("memprof key: the history it claims is not known, ignored")
        del kept["recorded"]["history"]
    if not isinstance(kept.get("versions", {}).get("torch", ""), str):
        notes.append("memprof key: torch's version is no text, ignored")
        del kept["versions"]["torch"]
    return kept


def _problem(key: Any, raw: Any, part: Any) -> str:
    if not isinstance(key, str):
        return "a name in it is no text"
    name = repr(clean_text(key, 40))
    if part is None:
        return "" if raw is None else f"{name} is no plain data, or too deep"
    wanted = _TYPES.get(key)
    if wanted and (not isinstance(part, wanted) or isinstance(part, bool)):
        return f"{name} is not of the documented type"
    if key == "kind" and part not in [str(k) for k in Kind]:
        return f"kind {part[:40]!r} is not known"
    return ""


class _TooMuch(ValueError):
    """Too deep, too many values, or not plain."""


def clean(value: Any) -> Any:
    """A copy of plain data with printable text and string keys; None where it is no such thing."""
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


def clean_text(text: str, longest: int = 1 << 20) -> str:
    """Text without control characters (terminal escapes) and lone surrogates; new lines and tabs stay."""
    text = text[:longest]
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
