"""Simulate a report's advice, from the report alone: ``memprof advise`` puts it in place of the estimates."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from memprof.advice.combine import combine, combine_estimates
from memprof.advice.recorded_run import run_of
from memprof.config.from_recording import place_model, ran_on, settings_like
from memprof.errors import InputError, UsageError

# Beyond what the list of changes may take, looking for a set may take this many times as long.
_SET_TAKES = 3


def simulated_parts(
    report: Mapping[str, Any],
    models: Path,
    *,
    gpu: str | None = None,
    seconds: float = 180.0,
    workers: int | None = None,
    use_cache: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Return what simulating puts into a report: ``advice``, ``unchanged``, ``notes`` and, for a GPU, ``combination``.

    Where the run cannot be simulated a note says why, and what a GPU asked for is estimated.

    Args:
        models: a folder for the model's config.
        gpu: name or size of a card that the run is to fit.
        seconds: when to stop starting simulations.
        workers, use_cache, progress: see :class:`memprof.plan.subprocess_runner.Runner`.
    """
    from memprof.advice.evaluate import evaluate_advice
    from memprof.plan.subprocess_runner import runner

    try:
        likeness = settings_like(report["source"])
        settings = place_model(likeness, models)
        simulating = partial(runner, workers=workers, progress=progress, use_cache=use_cache)
        with simulating(ran_on(report["source"], settings)) as machine:
            batch = workers or max(1, min(os.cpu_count() or 1, 4))
            found = evaluate_advice(report, settings, machine, seconds=seconds, batch=batch)
        together = None
        if gpu is not None:
            with simulating(gpu) as machine:
                on_card, shift = settings.with_(device="cuda"), _beyond(report, found.base)
                time = _SET_TAKES * max(seconds, 60.0)
                together = combine(on_card, gpu, machine, run_of(report), shift=shift, seconds=time)
    except (InputError, UsageError) as error:
        return estimated_parts(report, gpu, str(error))
    notes = [f"Not simulated: {name.replace('_', ' ')}, {why.rstrip('.')}." for name, why in found.refused.items()]
    unchanged = {
        "measured_bytes": int(report["peak"]["allocated_bytes"]),
        "simulated_bytes": int(found.base["peak_bytes"]),
        "assumed": likeness.words(),
    }
    parts = {"advice": found.entries, "unchanged": unchanged, "notes": [*notes, *report["notes"]]}
    return parts if together is None else {**parts, "combination": together.to_dict()}


def estimated_parts(report: Mapping[str, Any], gpu: str | None, why: str = "") -> dict[str, Any]:
    """Return what estimates put into a report: a note of ``why`` nothing is simulated, ``combination`` for a GPU."""
    parts: dict[str, Any] = {"notes": list(report["notes"])}
    if why:
        parts["notes"].insert(0, f"{why.rstrip('.')}; savings are estimates.")
    if gpu is not None:
        parts["combination"] = combine_estimates(report, gpu).to_dict()
    return parts


def _beyond(report: Mapping[str, Any], base: Mapping[str, Any]) -> int:
    """Return what the recorded run reserved beyond its own simulation; 0 for a run that is a simulation itself."""
    reserved = report["device_peak"]["reserved_bytes"]
    if report["source"]["kind"] != "cuda" or reserved is None or base["device_peak_bytes"] is None:
        return 0
    outside = (base.get("verdict") or {}).get("non_torch_bytes", 0)
    return int(reserved - (base["device_peak_bytes"] - outside))
