"""Check a snapshot's ``"memprof"`` key: keep what has the documented types and drop the rest with a note."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from memprof.vocabulary import Category, History, Kind, Phase

SCHEMA = "memprof.snapshot/1"

_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("schema", "kind", "node", "created"), (str,)),
    **dict.fromkeys(("rank", "world_size", "non_torch_bytes"), (int,)),
    **dict.fromkeys(("versions", "device", "config", "setup", "recorded", "outside", "host"), (dict,)),
    **dict.fromkeys(("devices", "phases", "steps", "owners", "holders", "buckets", "counters", "samples"), (list,)),
    **dict.fromkeys(("switches", "survived", "notes", "own_folders"), (list,)),
    **dict.fromkeys(("oom", "overhead"), (dict,)),
    "redacted": (bool,),
    # Only in simulated runs; memprof.analysis.prediction checks their content.
    **dict.fromkeys(("expected_error", "fit", "generation", "lengths"), (dict,)),
    "estimated_time": (dict, type(None)),
}
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
_TEXT: _Kinds = (str, _NONE)
_WHOLE: _Kinds = (int, _NONE)
_NUMBER: _Kinds = (int, float, _NONE)
_BYTES = _Range(0, 1 << 60)
_SIZE: _Kinds = (_BYTES, _NONE)
_STEP: _Kinds = (_Range(-(1 << 31), (1 << 31) - 1), _NONE)
_PHASES = frozenset(str(p) for p in Phase)
_CATEGORIES = frozenset(str(c) for c in Category)
_SWITCHES = frozenset(("sleep", "wake", "weight_sync"))

# Types of the entries of each list, or of the values of each dict. A dict's name is required unless its
# types include None; a name that is not listed may hold anything.
_RECORDS: dict[str, dict[str, _Kinds]] = {
    "phases": {"phase": (str,), "start_us": (int,), "end_us": _WHOLE, "step": _STEP, "within": _TEXT, "detail": _TEXT},
    "counters": {
        "phase": (_PHASES,),
        "start_us": (int,),
        "end_us": (int,),
        "step": _STEP,
        **dict.fromkeys(("allocated_peak", "allocated_end", "reserved_peak", "reserved_end"), _SIZE),
        **dict.fromkeys(("active_peak", "requested_peak"), _SIZE),
    },
    "devices": {"index": (int,), "type": _TEXT, "name": _TEXT, "total_bytes": _SIZE},
    "survived": {
        "requested_bytes": (_BYTES,),
        "time_us": (int,),
        "went_on_us": (int,),
        "device": _WHOLE,
        "step": _STEP,
        "phase": _TEXT,
    },
}
_ROWS: dict[str, tuple[_Kinds, ...]] = {  # the last entry holds for every later column
    "steps": ((_STEP[0],), (int,), (int,), _SIZE),
    "owners": ((int,), (int,), (str,), _TEXT),
    "holders": ((int,), (int,), (str,)),
    "samples": ((int,), _WHOLE),
    "switches": ((int,), (_SWITCHES,), _STEP, _SIZE),
    "own_folders": ((str,), (str,)),
}
_FIELDS: dict[str, dict[str, _Kinds]] = {
    "device": {"index": _WHOLE, "type": _TEXT, "name": _TEXT, "total_bytes": _SIZE},
    "recorded": {
        **dict.fromkeys(("start_us", "stop_us"), _WHOLE),
        **dict.fromkeys(("dropped_events", "max_entries"), _SIZE),
        "history": (frozenset(str(h) for h in History), _NONE),
        "thinned": (list, _NONE),
    },
    "host": {
        **dict.fromkeys(("pinned_bytes", "pinned_requested_bytes", "managed_bytes", "rss_bytes"), _SIZE),
        "offloaded": (dict, _NONE),
    },
    "outside": dict.fromkeys(("processes", "allocators"), (list, _NONE)),
    "overhead": {"seconds_in_memprof": _NUMBER, "bytes_of_history": _WHOLE},
    "oom": {
        "requested_bytes": (_BYTES,),
        **dict.fromkeys(("device_free_bytes", "limit_bytes"), _SIZE),
        **dict.fromkeys(("time_us", "device"), _WHOLE),
        "step": _STEP,
        "phase": (_PHASES, _NONE),
        "stack": (list, _NONE),
    },
}
_LIMITS: dict[str, _Kinds] = {
    "non_torch_bytes": (_BYTES,),
    **dict.fromkeys(("rank", "world_size"), (_Range(0, MOST_RANKS),)),
}
# What every entry of a list, or value of a dict, must be.
_INNER: dict[str, _Kinds] = {
    "versions": _TEXT,
    "notes": (str,),
    "buckets": (_BYTES,),
    "stack": (str,),
    "offloaded": (_BYTES,),
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
        kinds = _RECORDS[key]
        good = [entry for entry in part if _is_record(entry, kinds)]
        if key in ("counters", "survived"):  # a figure that is left out is one that is not known
            good = [{**dict.fromkeys(kinds), **entry} for entry in good]
        return good, len(part) - len(good)
    if key in _ROWS:
        good = [entry for entry in part if _is_row(entry, _ROWS[key])]
        return good, len(part) - len(good)
    if key in _FIELDS:
        return _fields(key, part, _FIELDS[key])
    return _inner(key, part)


def _fits(value: Any, kinds: _Kinds) -> bool:
    if type(value) in kinds:
        return True
    if type(value) is int:
        return any(type(k) is _Range and k.low <= value <= k.high for k in kinds)
    return type(value) is str and any(type(k) is frozenset and value in k for k in kinds)


def _is_record(entry: Any, kinds: dict[str, _Kinds]) -> bool:
    return type(entry) is dict and all(_fits(entry.get(name), allowed) for name, allowed in kinds.items())


def _is_row(entry: Any, kinds: tuple[_Kinds, ...]) -> bool:
    if type(entry) is not list or len(entry) < sum(_NONE not in allowed for allowed in kinds):
        return False
    return all(_fits(value, kinds[min(i, len(kinds) - 1)]) for i, value in enumerate(entry))


def _inner(name: str, part: Any) -> tuple[Any, int]:
    """Return a list or a dict without what is not documented in it, and how much of that there was."""
    good = part
    if name == "thinned":
        good = [row[:2] for row in part if _is_row(row, ((int,), (int,)))]
    elif name in _INNER and isinstance(part, dict):
        known = _CATEGORIES if name == "offloaded" else part
        good = {k: v for k, v in part.items() if k in known and _fits(v, _INNER[name])}
    elif name in _INNER:
        good = [v for v in part if _fits(v, _INNER[name])]
    return good, len(part) - len(good) if isinstance(part, (dict, list)) else 0


def _fields(key: str, part: dict[str, Any], kinds: dict[str, _Kinds]) -> tuple[dict[str, Any] | None, int]:
    # An error's other figures are computed by the report, never read.
    good = {n: v for n, v in part.items() if (_fits(v, kinds[n]) if n in kinds else key != "oom")}
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
    wanted = _TYPES.get(key)
    if wanted and type(part) not in wanted:  # True is no number
        return f"{name} is not of the documented type"
    if key in _LIMITS and not _fits(part, _LIMITS[key]):
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


def clean_text(text: str, longest: int = 1 << 20) -> str:
    """Replace control characters (terminal escapes) and lone surrogates in text; keep new lines and tabs."""
    text = text[:longest]
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
