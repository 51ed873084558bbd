"""Out-of-memory texts as people paste them: found in a log, every number explained, what to try. No torch."""

from memprof.oom.explain import explain_log
from memprof.oom.failure import Failure
from memprof.oom.find import find_failures
from memprof.oom.render import render_markdown, render_text

__all__ = ["Failure", "explain_log", "find_failures", "render_markdown", "render_text"]
