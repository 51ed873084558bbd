"""Decide what every allocation is for, and say how that is known (see ``docs/attribution.md``).

The names below are loaded on first use: the table of rules is also read by ``memprof oom``, which needs no numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memprof.attribution.attribute import attribute
    from memprof.attribution.result import Attribution, PhaseSpan, PhaseTrack
    from memprof.attribution.rules import RuleSet, load_rules

__all__ = ["Attribution", "PhaseSpan", "PhaseTrack", "RuleSet", "attribute", "load_rules"]

_HOME = {
    "Attribution": "result",
    "PhaseSpan": "result",
    "PhaseTrack": "result",
    "RuleSet": "rules",
    "attribute": "attribute",
    "load_rules": "rules",
}


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # the module attribute.py would otherwise stand for its function
    return value
