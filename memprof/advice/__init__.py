"""Find what would lower a run's peak: changes to its settings, what each saves and costs. Simulating needs torch."""

from memprof.advice.candidate import Candidate
from memprof.advice.estimate import estimated_advice
from memprof.advice.recorded_run import Peak, Run

__all__ = ["Candidate", "Peak", "Run", "estimated_advice"]
