"""Out-of-memory messages as people paste them: found in a log, every number explained, what to try. No torch."""

from memprof.oomtext.explain import explain_log
from memprof.oomtext.parse import Failure, find_failures

__all__ = ["Failure", "explain_log", "find_failures"]
