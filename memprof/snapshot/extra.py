"""Check a snapshot's ``"memprof"`` key: keep what has the documented types and drop the rest with a note."""

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
    "devices": (list,),
    "rank": _INT,
    "world_size": _INT,
    "node": (str,),
    "created": (str,),
    "config": (dict,),
    "setup": (dict,),
    "recorded": (dict,),
    "phases": (list,),
    "steps": (list,),
    "owners": (list,),
    "holders": (list,),
    "buckets": (list,),
    "counters": (list,),
    "samples": (list,),
    "switches": (list,),
    "outside": (dict,),
    "host": (dict,),
    "oom": (dict,),
    "survived": (list,),
    "non_torch_bytes": _INT,
    "overhead": (dict,),
    "notes": (list,),
    "own_folders": (list,),
    # Only in simulated runs; memprof.analysis.prediction checks their content.
    "expected_error": (dict,),
    "estimated_time": (dict, type(None)),
    "fit": (dict,),
    "generation": (dict,),
    "lengths": (dict,),
}


_MAX_DEPTH = 16
_MAX_VALUES = 20_000_000


_Kinds = tuple[type, ...]
_NONE = type(None)
_TEXT: _Kinds = (str, _NONE)
_WHOLE: _Kinds = (int, _NONE)
_NUMBER: _Kinds = (int, float, _NONE)

# Types of the entries of each list, or of the values of each dict. A dict's name is required unless its
# types include None; a name that is not listed may hold anything.
_RECORDS: dict[str, dict[str, _Kinds]] = {
    "phases": {"phase": (str,), "start_us": (int,), "end_us": _WHOLE, "step": _WHOLE, "within": _TEXT, "detail": _TEXT},
    "counters": {
        "phase": (str,),
        "start_us": (int,),
        "end_us": (int,),
        "step": _WHOLE,
        **dict.fromkeys(("allocated_peak", "allocated_end", "reserved_peak", "reserved_end"), _WHOLE),
        **dict.fromkeys(("active_peak", "requested_peak"), _WHOLE),
    },
    "devices": {"index": (int,), "type": _TEXT, "name": _TEXT, "total_bytes": _WHOLE},
    "survived": {
        "requested_bytes": (int,),
        "time_us": (int,),
        "went_on_us": (int,),
        **dict.fromkeys(("device", "step"), _WHOLE),
        "phase": _TEXT,
    },
}
_ROWS: dict[str, tuple[_Kinds, ...]] = {  # the last entry holds for every later column
    "steps": ((int,), (int,), (int,), _WHOLE),
    "owners": ((int,), (int,), (str,), _TEXT),
    "holders": ((int,), (int,), (str,)),
    "samples": ((int,), _WHOLE),
    "switches": ((int,), (str,), _WHOLE),
    "own_folders": ((str,), (str,)),
}
_FIELDS: dict[str, dict[str, _Kinds]] = {
    "versions": {"torch": _TEXT, "memprof": _TEXT, "python": _TEXT},
    "device": {"index": _WHOLE, "type": _TEXT, "name": _TEXT, "total_bytes": _WHOLE},
    "recorded": {
        **dict.fromkeys(("start_us", "stop_us", "dropped_events", "max_entries"), _WHOLE),
        "history": _TEXT,
        "thinned": (list, _NONE),
    },
    "host": dict.fromkeys(("pinned_bytes", "pinned_requested_bytes", "managed_bytes", "rss_bytes"), _WHOLE),
    "overhead": {"seconds_in_memprof": _NUMBER, "bytes_of_history": _WHOLE},
    "oom": {
        "requested_bytes": (int,),
        **dict.fromkeys(("device_free_bytes", "step", "time_us", "device", "limit_bytes"), _WHOLE),
        "phase": _TEXT,
        "stack": (list, _NONE),
    },
}


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
    if key in _RECORDS:
        good = [entry for entry in part if _is_record(entry, _RECORDS[key])]
        return good, len(part) - len(good)
    if key in _ROWS:
        good = [entry for entry in part if _is_row(entry, _ROWS[key])]
        return good, len(part) - len(good)
    if key in _FIELDS:
        return _fields(part, _FIELDS[key])
    if key in ("notes", "buckets"):
        good = [entry for entry in part if type(entry) is (str if key == "notes" else int)]
        return good, len(part) - len(good)
    return part, 0


def _is_record(entry: Any, kinds: dict[str, _Kinds]) -> bool:
    return type(entry) is dict and all(type(entry.get(name)) in allowed for name, allowed in kinds.items())


def _is_row(entry: Any, kinds: tuple[_Kinds, ...]) -> bool:
    if type(entry) is not list or len(entry) < sum(_NONE not in allowed for allowed in kinds):
        return False
    return all(type(value) in kinds[min(i, len(kinds) - 1)] for i, value in enumerate(entry))


def _fields(part: dict[str, Any], kinds: dict[str, _Kinds]) -> tuple[dict[str, Any] | None, int]:
    good = {name: value for name, value in part.items() if name not in kinds or type(value) in kinds[name]}
    dropped = len(part) - len(good)
    for name in ("thinned", "stack"):  # a list of pairs and a list of text
        inner = good.get(name)
        if isinstance(inner, list):
            good[name] = [v for v in inner if (_is_row(v, ((int,), (int,))) if name == "thinned" else type(v) is str)]
            dropped += len(inner) - len(good[name])
    if "history" in good and "history" in kinds and good["history"] not in _HISTORIES:
        del good["history"]
        dropped += 1
    complete = all(name in good for name, allowed in kinds.items() if _NONE not in allowed)
    return (good if complete else None), dropped + (not complete)


_HISTORIES = (None, *(str(h) for h in History))


def _problem(key: Any, raw: Any, part: Any) -> str:
    if not isinstance(key, str):
        return "a name in it is not text"
    name = repr(clean_text(key, 40))
    if part is None:
        return "" if raw is None else f"{name} is not plain data, or is nested too deep"
    wanted = _TYPES.get(key)
    if wanted and (not isinstance(part, wanted) or isinstance(part, bool)):
        return f"{name} is not of the documented type"
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


def clean_text(text: str, longest: int = 1 << 20) -> str:
    """Replace control characters (terminal escapes) and lone surrogates in text; keep new lines and tabs."""
    text = text[:longest]
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
