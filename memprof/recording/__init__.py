"""Record a run's memory and write a snapshot. Nothing here imports torch before something is recorded."""

from memprof.recording.api import record
from memprof.recording.phases import phase

__all__ = ["phase", "record"]
