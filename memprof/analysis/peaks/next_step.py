"""Look beyond a recording whose only step makes the optimizer's state: in the next one it is there from the start."""

from __future__ import annotations

from msgspec.structs import replace

from memprof.report import Report
from memprof.report.peaks import PhasePeak
from memprof.vocabulary import Category, Phase


def phases_of_next_step(report: Report) -> list[PhasePeak]:
    """Return the phases before the only optimizer step seen, with the state that it makes added; [] elsewhere.

    Where memory ran out, the report's ``oom.ahead`` counts that state; where anything follows that step, its peak shows
    it. Gradients are taken to be freed before the next forward, as in the step seen.
    """
    phases = [p for p in report.phases if p.phase != Phase.LOAD]
    steps = [i for i, p in enumerate(phases) if p.phase == Phase.OPTIMIZER_STEP]
    if report.oom is not None or len(steps) != 1 or steps[0] != len(phases) - 1:
        return []
    *before, step = phases
    state = step.categories.get(Category.OPTIMIZER_STATE, 0)
    if not state or any(p.categories.get(Category.OPTIMIZER_STATE) for p in before):
        return []
    added = {Category.OPTIMIZER_STATE: state}
    return [replace(p, peak_bytes=p.peak_bytes + state, categories={**p.categories, **added}) for p in before]


def next_step(report: Report) -> PhasePeak | None:
    """Return the phase that rises above the recorded peak in the next step; None where none does."""
    highest = max(phases_of_next_step(report), key=lambda p: p.peak_bytes, default=None)
    return highest if highest is not None and highest.peak_bytes > report.peak.active_bytes else None
