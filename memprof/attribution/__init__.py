"""What every allocation is for, and how that is known (see ``docs/attribution.md``)."""

from memprof.attribution.attribute import attribute
from memprof.attribution.result import Attribution, PhaseSpan, PhaseTrack
from memprof.attribution.rules import RuleSet, load_rules

__all__ = ["Attribution", "PhaseSpan", "PhaseTrack", "RuleSet", "attribute", "load_rules"]
