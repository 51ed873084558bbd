"""Explain out-of-memory texts as people paste them: every number, the cause, what to try. No torch."""

from memprof.oom.explain import explain_log
from memprof.oom.failure import Failure
from memprof.oom.reading.find import find_failures

__all__ = ["Failure", "explain_log", "find_failures"]
