"""Keep the renderer that draws an analysis in a notebook or as a page.

The analysis imports no renderer. ``memprof`` hands one in when it hands out ``analyze`` or ``Analysis``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Drawing(Protocol):
    """State what a renderer must do. It gets an ``Analysis`` or a ``Breakdown``, which import this module."""

    def analysis_fragment(self, analysis: Any) -> str:
        """Return an analysis as a piece of HTML."""

    def breakdown_fragment(self, breakdown: Any) -> str:
        """Return a breakdown as a piece of HTML."""

    def largest_fragment(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Return grouped allocations as a piece of HTML."""

    def write_page(self, analysis: Any, path: Path) -> None:
        """Write the page of an analysis."""


_drawing: list[Callable[[], Drawing]] = []


def use(load: Callable[[], Drawing]) -> None:
    """Set what loads the renderer; called once, loads nothing yet."""
    _drawing[:] = [load]


def drawing() -> Drawing:
    """Return the renderer.

    Raises:
        RuntimeError: there is none, because the analysis was not obtained through ``memprof``.
    """
    if not _drawing:
        raise RuntimeError("no renderer is known; use `from memprof import analyze`.")
    return _drawing[0]()


class Largest(list[dict[str, Any]]):
    """Hold grouped allocations: a list of dicts that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return drawing().largest_fragment(self)
