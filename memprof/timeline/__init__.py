"""Rebuild allocation lifetimes, block sizes and reserved memory from a snapshot's trace."""

from memprof.timeline.timeline import Timeline, build_timeline, history_of

__all__ = ["Timeline", "build_timeline", "history_of"]
