"""Keep the renderer that draws an analysis in a notebook or as a page.

The analysis imports no renderer. ``memprof`` hands one in when it hands out ``analyze`` or ``Analysis``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_load: list[Callable[[], Any]] = []


def use(load: Callable[[], Any]) -> None:
    """Set what loads the renderer, :mod:`memprof.reports.notebook`; called once, loads nothing yet."""
    _load[:] = [load]


def drawing() -> Any:
    """Return the renderer.

    Raises:
        RuntimeError: there is none, because the analysis was not obtained through ``memprof``.
    """
    if not _load:
        raise RuntimeError("no renderer is known; use `from memprof import analyze`.")
    return _load[0]()


class Largest(list[dict[str, Any]]):
    """Hold grouped allocations: a list of dicts that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return str(drawing().largest_fragment(self))
