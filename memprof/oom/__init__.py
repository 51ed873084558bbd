"""Explain out-of-memory texts as people paste them: every number, the cause, what to try. No torch.

Each name is loaded on first use: reports want frameworks' words only, and this room's patterns take time to compile.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memprof.oom.explain import explain_log
    from memprof.oom.failure import Failure
    from memprof.oom.reading.find import find_failures

__all__ = ["Failure", "explain_log", "find_failures"]

_HOME = {"Failure": "failure", "explain_log": "explain", "find_failures": "reading.find"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
