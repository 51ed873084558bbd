"""What each allocation is for, and how that is known."""

from memprof.attribution.model import Attribution, PhaseSpan, PhaseTrack

__all__ = ["Attribution", "PhaseSpan", "PhaseTrack"]
