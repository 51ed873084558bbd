"""Tell where every byte of a GRPO run's GPU memory went, and what shows it.

Importing this package is cheap: each name below is loaded on first use, and torch only by names that need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memprof._version import __version__

if TYPE_CHECKING:
    from memprof.advice.advised import analyze
    from memprof.analysis.analysis import Analysis
    from memprof.analysis.shown import Drawing
    from memprof.integrations.callback.callback import MemProfCallback
    from memprof.recording import phase, record
    from memprof.snapshot import Snapshot, load_snapshot
    from memprof.watch.attach import attach, attached
    from memprof.watch.collect import collect, request_dump

__all__ = [
    "Analysis",
    "MemProfCallback",
    "Snapshot",
    "__version__",
    "analyze",
    "attach",
    "attached",
    "collect",
    "load_snapshot",
    "phase",
    "record",
    "request_dump",
]

_HOME = {
    "Analysis": "memprof.analysis.analysis",
    "MemProfCallback": "memprof.integrations.callback.callback",
    "Snapshot": "memprof.snapshot",
    "analyze": "memprof.advice.advised",
    "attach": "memprof.watch.attach",
    "attached": "memprof.watch.attach",
    "collect": "memprof.watch.collect",
    "request_dump": "memprof.watch.collect",
    "load_snapshot": "memprof.snapshot",
    "phase": "memprof.recording",
    "record": "memprof.recording",
}

_EXTRA = {"torch": "record", "transformers": "record", "trl": "record"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'memprof' has no attribute {name!r}")
    from memprof.errors import import_for

    home = import_for(f"memprof.{name}", _HOME[name], _EXTRA)
    if name in ("Analysis", "analyze"):
        from memprof.analysis.shown import use

        use(_drawing)
    return getattr(home, name)


def _drawing() -> Drawing:
    """Load what draws an analysis in a notebook."""
    from memprof.reports import notebook

    return notebook


def __dir__() -> list[str]:
    return sorted(__all__)
