"""Tell whether memory grows from step to step, by longer completions or by allocations that stay.

Each cause has its own method. A least-squares line through (tokens, peak) tells whether peaks follow the tokens
of their step. Allocations born in a step and still alive when the recording ends are counted by the stack that
made them: a leak is one stack that leaves bytes behind in several steps, while a cache or a lazily built state
stays once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memprof.attribution.result import Attribution
from memprof.report.run import LeftBehind, StepGrowth, StepMemory
from memprof.snapshot.model import I64, distinct
from memprof.timeline.timeline import Timeline
from memprof.vocabulary import Category

_CATEGORIES = list(Category)
_MOST_LEFT_BEHIND = 10


def growth(
    timeline: Timeline,
    attribution: Attribution,
    tokens: Mapping[int, int],
    stack_of: Callable[[int], Sequence[str]],
    holders: Mapping[int, Sequence[str]],
) -> StepGrowth:
    """Return how memory grows over the steps of one recording.

    ``end_bytes_per_step`` is the growth of the bytes left at the ends of steps; ``None`` with fewer than three steps.
    ``peak_bytes_per_token`` is the slope of peaks over tokens, and ``explained_by_tokens`` the share of the peaks'
    variance it accounts for (R²); both are ``None`` where tokens are not known or do not vary.

    Args:
        tokens: the tokens that a step trained on, by its number.
        stack_of: returns a stack by its number, as lines.
        holders: what referred to the allocation of a row when the recording ended.
    """
    steps = _steps(timeline, attribution, tokens)
    ends = np.array([s.end_bytes for s in steps], dtype=np.float64)
    trained = np.array([s.tokens for s in steps if s.tokens is not None], dtype=np.float64)
    peaks = np.array([s.peak_bytes for s in steps if s.tokens is not None], dtype=np.float64)
    per_token, explained = _regress(trained, peaks)
    left = _left_behind(timeline, attribution)[:_MOST_LEFT_BEHIND]
    return StepGrowth(
        steps=tuple(steps),
        end_bytes_per_step=float(np.polyfit(np.arange(len(ends)), ends, 1)[0]) if len(steps) >= 3 else None,
        peak_bytes_per_token=per_token,
        explained_by_tokens=explained,
        left_behind=tuple(
            LeftBehind(
                bytes=stack.bytes,
                bytes_per_step=stack.bytes / stack.steps,
                steps=stack.steps,
                category=stack.category,
                held_by=tuple(sorted({who for row in stack.rows for who in holders.get(row, ())})),
                stack=tuple(stack_of(stack.number)),
            )
            for stack in left
        ),
    )


def _steps(timeline: Timeline, attribution: Attribution, tokens: Mapping[int, int]) -> list[StepMemory]:
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
        peak, end = int(timeline.allocated[first : last + 1].max()), int(timeline.allocated[last])
        found.append(StepMemory(step=step, peak_bytes=peak, end_bytes=end, tokens=tokens.get(step)))
    return found


def _regress(x: np.ndarray, y: np.ndarray) -> tuple[float | None, float | None]:
    if len(x) < 3 or np.ptp(x) == 0:
        return None, None
    slope, intercept = np.polyfit(x, y, 1)
    spread = float(((y - y.mean()) ** 2).sum())
    missed = float(((y - slope * x - intercept) ** 2).sum())
    return float(slope), 1.0 - missed / spread if spread else None


@dataclass(frozen=True)
class _LeavingStack:
    """Hold a stack (its ``number``) that left ``bytes`` behind in several ``steps``, and its ``rows``."""

    number: int
    bytes: int
    steps: int
    category: Category
    rows: list[int]


def _left_behind(timeline: Timeline, attribution: Attribution) -> list[_LeavingStack]:
    """List the stacks that left bytes behind in at least two steps, without the last (unfinished) step."""
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
        found.append(_LeavingStack(stack, total, n_steps, _CATEGORIES[category], of_stack.tolist()))
    return sorted(found, key=lambda left: -left.bytes)
