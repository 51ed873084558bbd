"""Tell what a run was doing when it ran out of memory, from a pasted traceback and attribution's table of stacks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from memprof.attribution.rules import file_test, function_names, load_rules
from memprof.frame_paths import frame_path
from memprof.oom.failure import TracebackFrame

_STANDARD = re.compile(
    r"(?i)(?:.{0,1000}[/\\])?lib(?:64)?[/\\]python\d[^/\\]{0,100}[/\\]|<frozen|<string>|<__array_function__"
)


def phase_of(frames: Sequence[TracebackFrame]) -> str | None:
    """Return the phase a traceback ended in, or None where no rule of ``rules.toml`` knows its frames."""
    if not frames:
        return None
    rules = load_rules().phases
    for rank in sorted({rule.rank for rule in rules}):
        at_rank = [rule for rule in rules if rule.rank == rank]
        tried = [(rule, rule.outermost, frames[0]) for rule in at_rank]
        tried += [(rule, rule.frames, frame) for frame in reversed(frames) for rule in at_rank]
        for rule, patterns, frame in tried:
            if any(_matches(pattern, frame) for pattern in patterns):
                return _which_pass(frames) if rule.phase == "logprobs" else rule.phase
    return None


def _which_pass(frames: Sequence[TracebackFrame]) -> str | None:
    """Tell whose log-probabilities a pass computes; None for a lone frame, which a loss or a rollout may call."""
    if any("ref" in frame.function.lower() or re.search(r"\bref_|\.ref\b|ref_model", frame.code) for frame in frames):
        return "reference_logprobs"
    return "old_logprobs" if len(frames) > 1 else None


def _matches(pattern: str, frame: TracebackFrame) -> bool:
    file, _, function = pattern.partition(":")
    if function != "*" and not function_names(function).fits(frame.function):
        return False
    return file == "*" or file_test(file)(frame_path(frame.path))


def own_frame(frames: Sequence[TracebackFrame]) -> str | None:
    """Return the innermost frame outside installed libraries, as ``file:line function``."""
    for frame in reversed(frames):
        if frame.path and not frame_path(frame.path).rooted and not _STANDARD.match(frame.path):
            return f"{frame.path}:{frame.line} {frame.function}".strip()
    return None
