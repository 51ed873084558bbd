"""Tell whether memory grows from step to step, by longer completions or by allocations that stay.

Each cause has its own method. A least-squares line through (tokens, peak) tells whether peaks follow the tokens
of their step. Allocations born in a step and still alive when the recording ends are counted by the stack that
made them: a leak is one stack that leaves bytes behind in several steps, while a cache or a lazily built state
stays once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from memprof.attribution.result import Attribution
from memprof.snapshot.model import I64, distinct
from memprof.timeline.timeline import Timeline
from memprof.vocabulary import Category


def growth(timeline: Timeline, attribution: Attribution, tokens: dict[int, int] | None = None) -> dict[str, Any]:
    """Return how memory grows over the steps of one recording: a report's ``growth``.

    ``end_bytes_per_step`` is the growth of the bytes left at the ends of steps; ``None`` with fewer than three steps.
    ``peak_bytes_per_token`` is the slope of peaks over tokens, and ``explained_by_tokens`` the share of the peaks'
    variance it accounts for (R²); both are ``None`` where tokens are not known or do not vary. What is
    ``left_behind`` has the number of its stack and the timeline's ``rows``.

    Args:
        tokens: the tokens that a step trained on, by its number.
    """
    steps = _steps(timeline, attribution, tokens or {})
    ends = np.array([s["end_bytes"] for s in steps], dtype=np.float64)
    known = [s for s in steps if s["tokens"] is not None]
    trained, peaks = (np.array([s[name] for s in known], dtype=np.float64) for name in ("tokens", "peak_bytes"))
    per_token, explained = _regress(trained, peaks)
    return {
        "steps": steps,
        "end_bytes_per_step": float(np.polyfit(np.arange(len(ends)), ends, 1)[0]) if len(steps) >= 3 else None,
        "peak_bytes_per_token": per_token,
        "explained_by_tokens": explained,
        "left_behind": _left_behind(timeline, attribution),
    }


def _steps(timeline: Timeline, attribution: Attribution, tokens: dict[int, int]) -> list[dict[str, Any]]:
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
        found.append({"step": step, "peak_bytes": peak, "end_bytes": end, "tokens": tokens.get(step)})
    return found


def _regress(x: np.ndarray, y: np.ndarray) -> tuple[float | None, float | None]:
    if len(x) < 3 or np.ptp(x) == 0:
        return None, None
    slope, intercept = np.polyfit(x, y, 1)
    spread = float(((y - y.mean()) ** 2).sum())
    missed = float(((y - slope * x - intercept) ** 2).sum())
    return float(slope), 1.0 - missed / spread if spread else None


def _left_behind(timeline: Timeline, attribution: Attribution) -> list[dict[str, Any]]:
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
        found.append(
            {
                "bytes": total, "bytes_per_step": total / n_steps, "steps": n_steps,
                "category": str(list(Category)[category]), "stack": stack, "rows": of_stack.tolist(),
            }
        )  # fmt: skip
    return sorted(found, key=lambda row: -row["bytes"])
