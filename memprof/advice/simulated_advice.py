"""Simulate a report's advice, from the report alone: ``memprof advise`` puts it in place of the estimates."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from memprof.advice.combine import combine, combine_estimates
from memprof.advice.recorded_run import run_of
from memprof.config.from_recording import place_model, ran_on, settings_like
from memprof.errors import InputError, UsageError
from memprof.report import Report
from memprof.report.advice import Unchanged
from memprof.report.codec import to_builtins
from memprof.vocabulary import Kind

if TYPE_CHECKING:
    from memprof.analysis.views import Views
    from memprof.plan.simulations import SimulatedRow

# Beyond what the list of changes may take, looking for a set may take this many times as long.
_SET_TAKES = 3


def with_simulated_advice(
    report: Report,
    models: Path,
    *,
    gpu: str | None = None,
    seconds: float = 180.0,
    workers: int | None = None,
    use_cache: bool = True,
    progress: Callable[[int, int], None] | None = None,
    analysis: Views | None = None,
) -> Report:
    """Return the report with simulated ``advice``, ``unchanged``, ``notes`` and, for a GPU, ``combination``.

    Where the run cannot be simulated a note says why, and what a GPU asked for is estimated.

    Args:
        models: a folder for the model's config.
        gpu: name or size of a card that the run is to fit.
        seconds: when to stop starting simulations.
        workers, use_cache, progress: see :class:`memprof.plan.subprocess_runner.Runner`.
        analysis: what the report is of, for estimates where it cannot be simulated.
    """
    from memprof.advice.evaluate import evaluate_advice
    from memprof.plan.subprocess_runner import runner

    try:
        source = to_builtins(report.source)
        likeness = settings_like(source)
        settings = place_model(likeness, models)
        simulating = partial(runner, workers=workers, progress=progress, use_cache=use_cache)
        with simulating(ran_on(source, settings)) as machine:
            batch = workers or max(1, min(os.cpu_count() or 1, 4))
            found = evaluate_advice(report, settings, machine, seconds=seconds, batch=batch)
        together = report.combination
        if gpu is not None:
            with simulating(gpu) as machine:
                on_card, shift = settings.with_(device="cuda"), _beyond(report, found.base)
                time = _SET_TAKES * max(seconds, 60.0)
                together = combine(on_card, gpu, machine, run_of(report), shift=shift, seconds=time)
    except (InputError, UsageError) as error:
        return with_estimated_combination(report, gpu, str(error), analysis)
    notes = [f"Not simulated: {name.replace('_', ' ')}, {why.rstrip('.')}." for name, why in found.refused.items()]
    unchanged = Unchanged(
        measured_bytes=report.peak.allocated_bytes,
        simulated_bytes=found.base.peak_bytes,
        assumed=tuple(likeness.words()),
    )
    return replace(
        report,
        advice=tuple(found.entries),
        unchanged=unchanged,
        notes=(*notes, *report.notes),
        combination=together,
    )


def with_estimated_combination(
    report: Report, gpu: str | None, why: str = "", analysis: Views | None = None
) -> Report:
    """Return the report with what estimates say of a ``gpu``, and a note of ``why`` nothing is simulated."""
    notes = (f"{why.rstrip('.')}; savings are estimates.", *report.notes) if why else report.notes
    together = report.combination if gpu is None else combine_estimates(report, gpu, analysis)
    return replace(report, notes=notes, combination=together)


def _beyond(report: Report, base: SimulatedRow) -> int:
    """Return what the recorded run reserved beyond its own simulation; 0 for a run that is a simulation itself."""
    reserved = report.device_peak.reserved_bytes
    if report.source.kind != Kind.CUDA or reserved is None or base.device_peak_bytes is None:
        return 0
    return reserved - (base.device_peak_bytes - base.non_torch_bytes)
