"""Keep what was found out of a large snapshot for the next command."""

from __future__ import annotations

from memprof.analysis.kept.entries import Entry, Parts, entry_of

__all__ = ["Entry", "Parts", "entry_of"]
