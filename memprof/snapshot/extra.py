"""The ``"memprof"`` key: kept where it has the documented types, dropped with a note where not."""

from __future__ import annotations

from typing import Any

from memprof.vocabulary import Kind

__all__ = ["SCHEMA", "check_extra"]

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


def check_extra(value: Any, notes: list[str]) -> dict[str, Any]:
    """The part of the ``"memprof"`` key that can be used; what cannot is named in ``notes``."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        notes.append("the memprof key is no dict and was ignored")
        return {}
    kept: dict[str, Any] = {}
    for key, part in value.items():
        problem = _problem(key, part)
        if problem:
            notes.append(f"memprof key: {problem}, ignored")
        elif part is not None:
            kept[key] = part
    return kept


def _problem(key: Any, part: Any) -> str:
    if not isinstance(key, str):
        return "a name in it is no text"
    if part is None:
        return ""
    wanted = _TYPES.get(key)
    if wanted and (not isinstance(part, wanted) or isinstance(part, bool)):
        return f"{key[:40]!r} is not of the documented type"
    if key == "kind" and part not in [k.value for k in Kind]:
        return f"kind {part[:40]!r} is not known"
    return ""
