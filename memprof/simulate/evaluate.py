"""Simulate a run, and judge whether it fits a GPU."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from memprof.config.fits import room_bytes
from memprof.config.gpus import Gpu, gpu_of
from memprof.config.settings import Settings
from memprof.errors import UsageError
from memprof.plan.simulations import SimulatedRow, SimulatedVerdict, SimulationRequest
from memprof.report.base import known
from memprof.report.codec import to_builtins
from memprof.simulate.ensemble import allocator_of, ensemble_of, margin_kept, reserved_within
from memprof.simulate.run import simulate_settings
from memprof.simulate.verdict import FitVerdict, host_need, verdict_of
from memprof.snapshot.columns import collector_paused
from memprof.vocabulary import Category, Phase

if TYPE_CHECKING:
    from memprof.analysis.analysis import Advisor, Analysis
    from memprof.foreign import SnapshotFile


@dataclass(frozen=True)
class Outcome:
    """Hold a simulation: its raw snapshot, that snapshot's analysis, and the verdict where a GPU was given."""

    raw: SnapshotFile
    analysis: Analysis
    verdict: FitVerdict | None


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
        raise UsageError("--host-memory requires --gpu.")
    return judge(
        lambda room: simulate_settings(settings, gpu=gpu, capacity=room, stacks=stacks, growth=growth),
        gpu, advisor, again=again,
    )  # fmt: skip


def judge(
    run: Callable[[int | None], SnapshotFile], gpu: Gpu | None, advisor: Advisor | None = None, *, again: bool = True
) -> Outcome:
    """Judge anything that can be simulated: ``run(capacity)`` returns a raw snapshot.

    ``again``: as in :func:`evaluate`.
    """
    with collector_paused():  # not as a decorator, which would stand in every stack
        return _judged(run, gpu, advisor, again)


def _judged(
    run: Callable[[int | None], SnapshotFile], gpu: Gpu | None, advisor: Advisor | None, again: bool
) -> Outcome:
    raw = run(None)
    analysis = analyse(raw, advisor)
    if gpu is None or analysis.device_peak is None:
        return _outcome(raw, analysis, None)
    room = room_bytes(gpu, margin_kept(analysis))
    limited = analysis.snapshot.run.oom is not None  # by the process's own memory fraction: the GPU had no limit
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


def _outcome(raw: SnapshotFile, analysis: Analysis, verdict: FitVerdict | None) -> Outcome:
    """Put the verdict into the snapshot, which reports and screens read."""
    if verdict is not None:
        host = host_need(analysis)
        verdict = dataclasses.replace(verdict, host=host, fits=verdict.fits and host.fits is not False)
        fit = verdict.answer()
        raw["memprof"]["fit"] = to_builtins(fit)
        analysis.snapshot = analysis.snapshot.with_run(fit=fit)
    return Outcome(raw, analysis, verdict)


def analyse(raw: SnapshotFile, advisor: Advisor | None = None) -> Analysis:
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


def run_row(question: SimulationRequest) -> SimulatedRow:
    """Simulate what a process was asked for, and sum it up.

    Of a generation's steps the first and the last are run, of micro-batches the first three and the last: a search asks
    for many rows, and reserved memory that the growing cache leaves behind is given back before a run fails.

    The row's ``largest`` is what resizing this run finds (:func:`memprof.simulate.resizing.largest_fitting`). A row
    that fits and needs the share ``enough`` of what it may is not resized: it has no ``largest``.
    """
    card = gpu_of(question.gpu) if question.gpu is not None else None
    asked, sizes = Settings.from_dict(question.settings), question.sizes
    outcome = evaluate(asked, card, growth=False, again=False)
    row, verdict = summary_of(outcome), outcome.verdict
    if sizes is None or card is None or verdict is None:
        return row
    if verdict.fits and verdict.needed_bytes >= sizes.enough * verdict.limit_bytes:
        return row
    from memprof.simulate.resizing import largest_fitting

    return replace(row, largest=largest_fitting(outcome.analysis, asked, card, sizes))


def summary_of(outcome: Outcome) -> SimulatedRow:
    """Sum up an outcome: peaks by phase, the verdict, the host's share."""
    analysis, verdict = outcome.analysis, outcome.verdict
    phases: dict[Phase, int] = {}
    alive: dict[Phase, dict[Category, int]] = {}
    for breakdown in analysis.phases:
        phase = Phase(breakdown.phase)
        if breakdown.allocated_bytes > phases.get(phase, -1):
            phases[phase] = breakdown.allocated_bytes
            alive[phase] = breakdown.present
    host, time = analysis.snapshot.run.host, analysis.snapshot.run.estimated_time
    reserved = None if analysis.device_peak is None else analysis.device_peak.reserved_bytes
    return SimulatedRow(
        peak_bytes=analysis.peak.allocated_bytes,
        peak_phase=Phase(analysis.peak.phase),
        device_peak_bytes=reserved if verdict is None else verdict.needed_bytes,
        host_bytes=0 if host is None else (known(host.pinned_bytes) or 0) + (known(host.managed_bytes) or 0),
        categories=analysis.peak.present,
        phases=phases,
        phase_categories=alive,
        verdict=None
        if verdict is None
        else SimulatedVerdict(
            limit_bytes=verdict.limit_bytes,
            needed_bytes=verdict.needed_bytes,
            non_torch_bytes=verdict.non_torch_bytes,
            phases=verdict.phases,
        ),
        fits=None if verdict is None else verdict.fits,
        step_s=None if time is None else time.step_s,
    )
