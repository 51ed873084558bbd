"""Analyse a run and describe it as plain data; :func:`analyze` is the way in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memprof.analysis.analysis import Analysis, analyze

__all__ = ["Analysis", "analyze"]


def __getattr__(name: str) -> Any:
    """Load the analysis on first use, because modules beside it need no numpy."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from memprof.analysis import analysis

    return getattr(analysis, name)
