"""Tell where every byte of a GRPO run's GPU memory went, and what shows it.

Importing this package is cheap: each name below is loaded on first use, and torch only by names that need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memprof._version import __version__

if TYPE_CHECKING:
    from memprof.advice.analyze_with_advice import analyze
    from memprof.analysis.analysis import Analysis
    from memprof.instrument.attach import attach, attached
    from memprof.instrument.dump_requests import collect, request_dump
    from memprof.integrations.callback.callback import MemProfCallback
    from memprof.recording import phase, record
    from memprof.reports.figures import figure
    from memprof.snapshot import Snapshot, load_snapshot

__all__ = [
    "Analysis",
    "MemProfCallback",
    "Snapshot",
    "__version__",
    "analyze",
    "attach",
    "attached",
    "collect",
    "figure",
    "load_snapshot",
    "phase",
    "record",
    "request_dump",
]

_HOME = {
    "Analysis": "memprof.analysis.analysis",
    "MemProfCallback": "memprof.integrations.callback.callback",
    "Snapshot": "memprof.snapshot",
    "analyze": "memprof.advice.analyze_with_advice",
    "attach": "memprof.instrument.attach",
    "attached": "memprof.instrument.attach",
    "collect": "memprof.instrument.dump_requests",
    "figure": "memprof.reports.figures",
    "request_dump": "memprof.instrument.dump_requests",
    "load_snapshot": "memprof.snapshot",
    "phase": "memprof.recording",
    "record": "memprof.recording",
}

_EXTRA = {"torch": "record", "transformers": "record", "trl": "record"}


if not TYPE_CHECKING:  # mypy would otherwise accept every attribute, misspelt ones as well

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'memprof' has no attribute {name!r}")
        from memprof.errors import import_for

        return getattr(import_for(f"memprof.{name}", _HOME[name], _EXTRA), name)


def __dir__() -> list[str]:
    return sorted(__all__)
