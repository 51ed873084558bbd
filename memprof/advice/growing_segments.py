"""Find out what ``expandable_segments:True`` would have saved a recorded run: replay its allocations with it.

Idle memory between blocks says little. Growing segments close such gaps, but they take memory from the device in pages
of 20 MiB for each stream and pool (2 MiB for small blocks), where an ordinary segment is as large as its first block.
A small run, or one with many streams, can need more with them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memprof.allocator.native import reserved_within
from memprof.allocator.settings import settings_of

if TYPE_CHECKING:
    from memprof.analysis.views import Views


def saved_by_growing(analysis: Views) -> int | None:
    """Return the bytes by which the reserved peak would have been lower (below zero: higher); None where not known.

    Blocks older than the recording are laid out anew, without gaps. All memory reserved when it began counts as needed:
    how much of it was in use is not known.
    """
    timeline = analysis.timeline
    if timeline.reserved is None or not timeline.n_events:
        return None
    recorded = settings_of(analysis.snapshot.settings)
    if recorded.expandable_segments:
        return None
    settings = replace(recorded, expandable_segments=True)
    needed = max(reserved_within(timeline.program(), settings, None), int(timeline.reserved[0]))
    return int(timeline.reserved.max()) - needed
