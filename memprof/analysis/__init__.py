"""Everything that is said of a run, as plain data: :func:`analyze` and what it rests on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memprof.analysis.analysis import Analysis, analyze

__all__ = ["Analysis", "analyze"]


def __getattr__(name: str) -> Any:
    """Load the analysis on first use: modules beside it do without numpy."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from memprof.analysis import analysis

    return getattr(analysis, name)
