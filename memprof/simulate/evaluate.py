"""Simulate a run, and judge whether it fits a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memprof.config.fits import room_bytes
from memprof.config.gpus import Gpu, gpu_of
from memprof.config.settings import Settings
from memprof.errors import UsageError
from memprof.report.codec import from_builtins
from memprof.report.simulation import Fit
from memprof.simulate.ensemble import allocator_of, ensemble_of, margin_kept, reserved_within
from memprof.simulate.run import simulate_settings
from memprof.simulate.verdict import Verdict, host_need, verdict_of
from memprof.snapshot.unpickle import collector_paused

if TYPE_CHECKING:
    from memprof.analysis.analysis import Advisor, Analysis


@dataclass(frozen=True)
class Outcome:
    """Hold a simulation: its raw snapshot, that snapshot's analysis, and the verdict where a GPU was given."""

    raw: dict[str, Any]
    analysis: Analysis
    verdict: Verdict | None


def evaluate(
    settings: Settings,
    gpu: Gpu | None,
    *,
    stacks: bool = True,
    advisor: Advisor | None = None,
    growth: bool = True,
    again: bool = True,
) -> Outcome:
    """Simulate a run and compare it with what the GPU has. ``advisor`` fills the report's ``advice``.

    ``growth``: as in :func:`memprof.simulate.run.simulate_settings`.

    The verdict is the worst of the run's variants (:mod:`memprof.simulate.ensemble`). A run whose reserved memory is
    too high while its live memory is not is simulated again on a card of that size: the allocator then gives cached
    segments back before it fails, as the real one does. Without ``again`` its allocations are replayed there, which
    gives the same verdict and leaves the snapshot as it was on a card with room for all.

    Raises:
        InputError, UsageError: as :func:`memprof.simulate.run.simulate_settings`.
    """
    if settings.host_memory is not None and gpu is None:
        raise UsageError("--host-memory is judged together with a card: say which one with --gpu.")
    return judge(
        lambda room: simulate_settings(settings, gpu=gpu, capacity=room, stacks=stacks, growth=growth),
        gpu, advisor, again=again,
    )  # fmt: skip


def judge(
    run: Callable[[int | None], dict[str, Any]], gpu: Gpu | None, advisor: Advisor | None = None, *, again: bool = True
) -> Outcome:
    """Judge anything that can be simulated: ``run(capacity)`` returns a raw snapshot.

    ``again``: as in :func:`evaluate`.
    """
    with collector_paused():  # not as a decorator, which would stand in every stack
        return _judged(run, gpu, advisor, again)


def _judged(
    run: Callable[[int | None], dict[str, Any]], gpu: Gpu | None, advisor: Advisor | None, again: bool
) -> Outcome:
    raw = run(None)
    analysis = analyse(raw, advisor)
    if gpu is None or analysis.device_peak is None:
        return _outcome(raw, analysis, None)
    room = room_bytes(gpu, margin_kept(analysis))
    limited = raw["memprof"]["oom"] is not None  # by the process's own memory fraction: the GPU had no limit
    if limited or int(analysis.timeline.active.max()) > room:
        return _outcome(raw, analysis, verdict_of(analysis, gpu, fits=False, flushes=False))
    ensemble = ensemble_of(analysis, gpu)
    own = analysis.device_peak.reserved_bytes <= room
    verdict = verdict_of(
        analysis, gpu, fits=own and not ensemble.failed, flushes=own and ensemble.flushes, ensemble=ensemble
    )
    if own or ensemble.failed:
        return _outcome(raw, analysis, verdict)
    if not again:
        reserved = reserved_within(analysis.timeline.program(), allocator_of(analysis, gpu), room)
        return _outcome(raw, analysis, verdict.squeezed(reserved))
    squeezed_raw = run(room)
    if squeezed_raw["memprof"]["oom"] is not None:
        return _outcome(raw, analysis, verdict)
    squeezed = analyse(squeezed_raw, advisor)
    return _outcome(squeezed_raw, squeezed, verdict_of(squeezed, gpu, fits=True, flushes=True, ensemble=ensemble))


def _outcome(raw: dict[str, Any], analysis: Analysis, verdict: Verdict | None) -> Outcome:
    """Put the verdict into the snapshot, which reports and screens read."""
    if verdict is not None:
        host = host_need(raw)
        verdict = replace(verdict, host=host, fits=verdict.fits and host.fits is not False)
        raw["memprof"]["fit"] = fit = verdict.to_dict()
        analysis.snapshot = analysis.snapshot.with_run(fit=from_builtins(fit, Fit))
    return Outcome(raw, analysis, verdict)


def analyse(raw: dict[str, Any], advisor: Advisor | None = None) -> Analysis:
    """Analyse a simulated run's snapshot, and leave the snapshot as it is."""
    from memprof.analysis.analysis import analyze
    from memprof.snapshot.reader import snapshot_from_raw

    # Reading consumes the lists of the dict it is given; the events themselves are shared.
    shallow = {
        **raw,
        "segments": copy.deepcopy(raw["segments"]),
        "device_traces": [list(t) for t in raw["device_traces"]],
    }
    return analyze(snapshot_from_raw(shallow), advisor=advisor)


def run_row(
    settings: dict[str, Any], gpu: str | dict[str, Any] | None, sizes: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Simulate settings given as plain data (so that a worker process can) and return a row of plain data.

    Of a generation's steps the first and the last are run, of micro-batches the first three and the last: a search asks
    for many rows, and reserved memory that the growing cache leaves behind is given back before a run fails.

    Args:
        settings: as :meth:`Settings.to_dict` writes them.
        gpu: a name, a size, or what :meth:`memprof.config.gpus.Gpu.to_dict` wrote.
        sizes: asks for the row's ``largest``, which resizing this run finds
            (:func:`memprof.simulate.resizing.largest_fitting`): ``of``, the settings that its ``first`` and ``more``
            change. A row that fits and needs the share ``enough`` of what it may is not resized: it has no ``largest``.
    """
    card, asked = gpu_of(gpu) if gpu is not None else None, Settings.from_dict(settings)
    outcome = evaluate(asked, card, growth=False, again=False)
    row = summary_of(outcome)
    verdict = outcome.verdict
    if sizes is None or card is None or verdict is None:
        return row
    if verdict.fits and verdict.needed_bytes >= sizes["enough"] * verdict.limit_bytes:
        return row
    from memprof.simulate.resizing import largest_fitting

    base = Settings.from_dict(sizes["of"])
    return {**row, "largest": largest_fitting(outcome.analysis, asked, card, base, sizes)}


def summary_of(outcome: Outcome) -> dict[str, Any]:
    """Sum up an outcome: peaks by phase, the largest category, the verdict, the host's share; sizes in bytes."""
    analysis = outcome.analysis
    categories = analysis.peak.categories
    phases: dict[str, int] = {}
    alive: dict[str, dict[str, int]] = {}
    for breakdown in analysis.phases:
        phase = str(breakdown.phase)
        if breakdown.allocated_bytes > phases.get(phase, -1):
            phases[phase] = breakdown.allocated_bytes
            alive[phase] = {str(name): size for name, size in breakdown.present.items()}
    host, verdict = outcome.raw["memprof"]["host"], outcome.verdict
    reserved = None if analysis.device_peak is None else analysis.device_peak.reserved_bytes
    time = outcome.raw["memprof"].get("estimated_time")
    return {
        "peak_bytes": analysis.peak.allocated_bytes,
        "peak_phase": str(analysis.peak.phase),
        "device_peak_bytes": reserved if verdict is None else verdict.needed_bytes,
        "host_bytes": int(host["pinned_bytes"] + host["managed_bytes"]),
        "largest_category": str(max(categories, key=lambda name: categories[name])),
        "categories": {str(name): size for name, size in analysis.peak.present.items()},
        "phases": phases,
        "phase_categories": alive,
        "verdict": verdict.to_dict() if verdict is not None else None,
        "fits": verdict.fits if verdict is not None else None,
        "step_s": time["step_s"] if time else None,
    }
