"""Tell whether memory grows from step to step, by longer completions or by allocations that stay.

Each cause has its own method. A least-squares line through (tokens, peak) tells whether peaks follow the tokens
of their step. Allocations born in a step and still alive when the recording ends are counted by the stack that
made them: a leak is one stack that leaves bytes behind in several steps, while a cache or a lazily built state
stays once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.attribution.result import Attribution
from memprof.snapshot.model import I64, distinct
from memprof.timeline.timeline import Timeline


@dataclass(frozen=True)
class StepMemory:
    """Hold one optimizer step: its highest allocated bytes, and the bytes left when it ends."""

    step: int
    peak_bytes: int
    end_bytes: int
    tokens: int | None


@dataclass(frozen=True)
class Leftover:
    """Hold the bytes that one stack (interned id) left behind in several steps; ``rows`` are the timeline's."""

    stack: int
    category: int
    steps: int
    bytes: int
    bytes_per_step: float
    rows: list[int]


@dataclass(frozen=True)
class Growth:
    """Hold how memory grows over the steps of a run.

    ``end_slope`` is the growth of the bytes left at the ends of steps, in bytes per step; ``None`` with fewer than
    three steps. ``peak_per_token`` is the slope of peaks over tokens in bytes, and ``explained`` the share of the
    peaks' variance it accounts for (R²); both are ``None`` where tokens are not known or do not vary.
    """

    steps: list[StepMemory]
    end_slope: float | None
    peak_per_token: float | None
    explained: float | None
    leftovers: list[Leftover]


def growth(timeline: Timeline, attribution: Attribution, tokens: dict[int, int] | None = None) -> Growth:
    """Measure memory over the steps of one recording; ``tokens`` maps a step to the tokens it trained on."""
    steps = _steps(timeline, attribution, tokens or {})
    ends = np.array([s.end_bytes for s in steps], dtype=np.float64)
    slope = float(np.polyfit(np.arange(len(ends)), ends, 1)[0]) if len(steps) >= 3 else None
    known = [s for s in steps if s.tokens is not None]
    per_token, explained = _regress(
        np.array([s.tokens for s in known], dtype=np.float64), np.array([s.peak_bytes for s in known], dtype=np.float64)
    )
    return Growth(steps, slope, per_token, explained, _leftovers(timeline, attribution))


def _steps(timeline: Timeline, attribution: Attribution, tokens: dict[int, int]) -> list[StepMemory]:
    marks = attribution.track.step
    starts = np.flatnonzero(np.diff(marks, prepend=-2))
    first_of: dict[int, int] = {}
    last_of: dict[int, int] = {}
    ends = starts + np.diff(starts, append=len(marks))
    for step, start, end in zip(marks[starts].tolist(), starts.tolist(), ends.tolist(), strict=True):
        first_of.setdefault(step, start + 1)
        last_of[step] = end
    found = []
    for step in sorted(step for step in first_of if step >= 0):
        first, last = first_of[step], last_of[step]
        peak = int(timeline.allocated[first : last + 1].max())
        found.append(StepMemory(step, peak, int(timeline.allocated[last]), tokens.get(step)))
    return found


def _regress(x: np.ndarray, y: np.ndarray) -> tuple[float | None, float | None]:
    if len(x) < 3 or np.ptp(x) == 0:
        return None, None
    slope, intercept = np.polyfit(x, y, 1)
    spread = float(((y - y.mean()) ** 2).sum())
    missed = float(((y - slope * x - intercept) ** 2).sum())
    return float(slope), 1.0 - missed / spread if spread else None


def _leftovers(timeline: Timeline, attribution: Attribution) -> list[Leftover]:
    """Return the stacks that left bytes behind in at least two steps, without the last (unfinished) step."""
    steps = attribution.step
    if not len(steps) or steps.max() < 0:
        return []
    stays = (timeline.free_event >= timeline.n_events) & (steps >= 0) & (steps < steps.max())
    rows: I64 = np.flatnonzero(stays)
    found = []
    for stack in distinct(timeline.stack[rows]).tolist():
        of_stack = rows[timeline.stack[rows] == stack]
        n_steps = len(distinct(steps[of_stack]))
        if n_steps < 2 or stack == 0:
            continue
        total = int(timeline.size[of_stack].sum())
        category = int(attribution.category[of_stack[np.argmax(timeline.size[of_stack])]])
        found.append(Leftover(stack, category, n_steps, total, total / n_steps, of_stack.tolist()))
    return sorted(found, key=lambda leftover: -leftover.bytes)
