"""Check the parts that only a simulated run's snapshot has: expected error, estimated time, verdict and lengths."""

from __future__ import annotations

from typing import Any

_NUMBER = (int, float)
_NONE = type(None)
_RANGE = {"low": _NUMBER, "high": _NUMBER, "comparisons": (int,)}
_POINT = {
    "length": (int,), "share_below": _NUMBER, "needed_bytes": (int,), "peak_bytes": (int,), "fits": (bool, _NONE),
    "executed": (bool,), "names": [(str,)],
}  # fmt: skip
# A dict stands for a record that must have all these names, or for a table of one kind where its key is ``str``; a list
# for a list of one kind, and a tuple for the types a value may have.
PARTS: dict[str, Any] = {
    "expected_error": {"allocated": _RANGE, "reserved": _RANGE, "not_compared": [(str,)], "sentence": (str,)},
    "estimated_time": {
        "step_s": _NUMBER, "phases": {str: _NUMBER}, "basis": (str,), "assumptions": [(str,)],
    },
    "fit": {
        "gpu": (str,), "total_bytes": (int,), "limit_bytes": (int,), "needed_bytes": (int,), "reserved_bytes": (int,),
        "non_torch_bytes": (int,), "headroom_bytes": (int,), "margin": _NUMBER, "fits": (bool,), "flushes": (bool,),
        "phase": (str,), "sentence": (str,),
        "phases": [
            {"phase": (str,), "allocated_bytes": (int,), "reserved_bytes": (int,), "needed_bytes": (int,),
             "fits": (bool,)},
        ],
    },
    "lengths": {
        "source": (str,), "count": (int,), "batch": (int,), "mean": _NUMBER, "points": [_POINT],
        "worst_case": _POINT, "largest_fitting": (int, _NONE), "share_of_steps_fitting": (int, float, _NONE),
        "sentence": (str,),
    },
}  # fmt: skip
_ENSEMBLE = {
    "members": (int,), "failed": (int,), "flushes": (bool,), "lowest_bytes": (int,), "highest_bytes": (int,),
}  # fmt: skip
# What older reports do not have.
_CLASS = {
    "class": (str,), "margin": _NUMBER, "basis": [{"class": (str,), **_RANGE}],
    "assumed": [{"setting": (str,), "value": (str, int, float, bool, _NONE)}],
}  # fmt: skip
_HOST = {"needed_bytes": (int,), "total_bytes": (int, _NONE), "fits": (bool, _NONE)}
_GENERATION = {"held_bytes": (int,), "reserved_bytes": (int,), "flushes": (int,), "expandable": (bool,)}


def usable(name: str, value: Any) -> dict[str, Any] | None:
    """Return the part without undocumented names; None where it is not as documented."""
    try:
        part: dict[str, Any] = _like(value, PARTS[name])
        if name == "expected_error":
            part |= {inner: _like(value[inner], kinds) for inner, kinds in _CLASS.items() if inner in value}
        if name == "fit":
            for inner, kinds in (("host", _HOST), ("ensemble", _ENSEMBLE)):
                part[inner] = None if value.get(inner) is None else _like(value[inner], kinds)
            if isinstance(value.get("kept"), str):
                part["kept"] = value["kept"]
            if value.get("generation") is not None:
                part["generation"] = _like(value["generation"], _GENERATION)
    except (TypeError, KeyError):
        return None
    return part


def _like(value: Any, wanted: Any) -> Any:
    if isinstance(wanted, tuple):
        if type(value) not in wanted:
            raise TypeError
        return value
    if isinstance(wanted, dict) and str in wanted:
        if not isinstance(value, dict):
            raise TypeError
        return {str(name): _like(entry, wanted[str]) for name, entry in value.items()}
    if isinstance(wanted, list):
        if not isinstance(value, list):
            raise TypeError
        return [_like(entry, wanted[0]) for entry in value]
    if not isinstance(value, dict):
        raise TypeError
    return {name: _like(value[name], kinds) for name, kinds in wanted.items()}
