"""Look beyond a recording whose only step makes the optimizer's state: in the next one it is there from the start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memprof.vocabulary import Category, Phase

__all__ = ["highest_in_next_step", "state_to_come"]


def state_to_come(report: Mapping[str, Any]) -> tuple[int, list[Mapping[str, Any]]]:
    """Return the bytes of state that the only optimizer step seen makes, and the phases before it, which lack them.

    Where memory ran out, the report's ``oom.ahead`` counts them; where anything follows that step, its peak shows them.

    Args:
        report: ``memprof.report/1``.
    """
    phases = [p for p in report["phases"] if p["phase"] != Phase.LOAD]
    steps = [i for i, p in enumerate(phases) if p["phase"] == Phase.OPTIMIZER_STEP]
    if report.get("oom") or len(steps) != 1 or steps[0] != len(phases) - 1:
        return 0, []
    *before, step = phases
    if any(p["categories"].get(Category.OPTIMIZER_STATE) for p in before):
        return 0, []
    return int(step["categories"].get(Category.OPTIMIZER_STATE, 0)), before


def highest_in_next_step(report: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the phase that rises above the recorded peak in the next step, and its bytes then; None where none does.

    Gradients are taken to be freed before its forward, as in the step seen.
    """
    state, before = state_to_come(report)
    highest = max(before, key=lambda p: int(p["peak_bytes"]), default=None)
    if not state or highest is None or highest["peak_bytes"] + state <= report["peak"]["active_bytes"]:
        return None
    return str(highest["phase"]), int(highest["peak_bytes"]) + state
