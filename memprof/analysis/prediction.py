"""Check the parts that only a simulated run's snapshot has: expected error, estimated time, verdict and lengths."""

from __future__ import annotations

from typing import Any

from memprof.snapshot.extra import documented, fits

PARTS = ("expected_error", "estimated_time", "fit", "lengths")
# Of what may be missing these are null then; others are left out.
_NULL = ("host?", "ensemble?")


def usable(name: str, value: Any) -> dict[str, Any] | None:
    """Return the part without undocumented names; None where it is not as documented."""
    try:
        part: dict[str, Any] = _like(value, documented()["simulated"][name])
    except (TypeError, KeyError):
        return None
    return part


def _like(value: Any, wanted: Any) -> Any:
    """Return of a value what is wanted of it: a table, a record, a list of one thing, or a value of some kinds."""
    if not (isinstance(value, type(wanted)) if isinstance(wanted, (dict, list)) else fits(value, wanted)):
        raise TypeError
    if isinstance(wanted, list):
        return [_like(entry, wanted[0]) for entry in value]
    if not isinstance(wanted, dict):
        return value
    if "*" in wanted:
        return {str(name): _like(entry, wanted["*"]) for name, entry in value.items()}
    found: dict[str, Any] = {}
    for name, kinds in wanted.items():
        known = name.rstrip("?")
        if not name.endswith("?") or value.get(known) is not None:
            found[known] = _like(value[known], kinds)
        elif name in _NULL:
            found[known] = None
    return found
