"""Does memory grow from step to step, and is it longer completions or something that stays?

Two questions with two methods. Do peaks follow the tokens of their step: a least-squares line through
(tokens, peak). What stays: allocations born in a step and still alive when the recording ends, by the
stack that made them; one stack that leaves bytes behind in several steps is a leak's signature, while
a cache or a lazily built state stays once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.attribution.result import Attribution
from memprof.snapshot.model import I64
from memprof.timeline.timeline import Timeline

__all__ = ["Growth", "Leftover", "StepMemory", "growth"]


@dataclass(frozen=True)
class StepMemory:
    """One optimizer step: its highest allocated bytes, and what is left when it ends."""

    step: int
    peak_bytes: int
    end_bytes: int
    tokens: int | None


@dataclass(frozen=True)
class Leftover:
    """Bytes one stack (interned id) left behind in several steps; ``rows`` of the timeline."""

    stack: int
    category: int
    steps: int
    bytes: int
    bytes_per_step: float
    rows: list[int]


@dataclass(frozen=True)
class Growth:
    """``end_slope`` is bytes per step of what is left at the ends; ``None`` with fewer than three steps.

    ``peak_per_token`` is the slope of peaks over tokens and ``explained`` the share of the peaks'
    variance it accounts for (R²); both ``None`` where tokens are not known or do not vary.
    """

    steps: list[StepMemory]
    end_slope: float | None
    peak_per_token: float | None
    explained: float | None
    leftovers: list[Leftover]


def growth(timeline: Timeline, attribution: Attribution, tokens: dict[int, int] | None = None) -> Growth:
    """Memory over the steps of one recording; ``tokens`` maps a step to the tokens it trained on."""
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
    found = []
    for step in np.unique(marks[marks >= 0]).tolist():
        events = np.flatnonzero(marks == step)
        first, last = int(events[0]) + 1, int(events[-1]) + 1
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
    """Stacks that left bytes behind in at least two steps, the last (unfinished) one aside."""
    steps = attribution.step
    if not len(steps) or steps.max() < 0:
        return []
    stays = (timeline.free_event >= timeline.n_events) & (steps >= 0) & (steps < steps.max())
    rows: I64 = np.flatnonzero(stays)
    found = []
    for stack in np.unique(timeline.stack[rows]).tolist():
        of_stack = rows[timeline.stack[rows] == stack]
        n_steps = len(np.unique(steps[of_stack]))
        if n_steps < 2 or stack == 0:
            continue
        total = int(timeline.size[of_stack].sum())
        category = int(attribution.category[of_stack[np.argmax(timeline.size[of_stack])]])
        found.append(Leftover(stack, category, n_steps, total, total / n_steps, of_stack.tolist()))
    return sorted(found, key=lambda leftover: -leftover.bytes)
