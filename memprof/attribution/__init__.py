"""Decide what every allocation is for, and say what shows it (see ``docs/attribution.md``).

The names below are loaded on first use, because ``memprof oom`` reads the table of rules without numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memprof.attribution.pipeline import attribute
    from memprof.attribution.result import Attribution, PhaseSpan, PhaseTrack
    from memprof.attribution.rules import RuleSet, load_rules

__all__ = ["Attribution", "PhaseSpan", "PhaseTrack", "RuleSet", "attribute", "load_rules"]

_HOME = {
    "Attribution": "result",
    "PhaseSpan": "result",
    "PhaseTrack": "result",
    "RuleSet": "rules",
    "attribute": "pipeline",
    "load_rules": "rules",
}


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
