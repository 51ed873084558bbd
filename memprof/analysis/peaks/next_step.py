"""Look beyond a recording whose only step makes the optimizer's state: in the next one it is there from the start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memprof.vocabulary import Category, Phase


def phases_of_next_step(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the phases before the only optimizer step seen, with the state that it makes added; [] elsewhere.

    Where memory ran out, the report's ``oom.ahead`` counts that state; where anything follows that step, its peak shows
    it. Gradients are taken to be freed before the next forward, as in the step seen.
    """
    phases = [p for p in report["phases"] if p["phase"] != Phase.LOAD]
    steps = [i for i, p in enumerate(phases) if p["phase"] == Phase.OPTIMIZER_STEP]
    if report.get("oom") or len(steps) != 1 or steps[0] != len(phases) - 1:
        return []
    *before, step = phases
    name = str(Category.OPTIMIZER_STATE)
    state = int(step["categories"].get(name, 0))
    if not state or any(p["categories"].get(name) for p in before):
        return []
    return [
        {**p, "peak_bytes": p["peak_bytes"] + state, "categories": {**p["categories"], name: state}} for p in before
    ]


def next_step(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the phase that rises above the recorded peak in the next step; None where none does."""
    highest = max(phases_of_next_step(report), key=lambda p: int(p["peak_bytes"]), default=None)
    return highest if highest and highest["peak_bytes"] > report["peak"]["active_bytes"] else None
