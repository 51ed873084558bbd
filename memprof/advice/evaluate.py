"""Simulate changed runs and the unchanged one: the difference is what a change saves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from memprof.advice.candidate import Candidate
from memprof.advice.estimate import MOST, Estimate, entry, estimate, idle_estimates, with_time, worth
from memprof.advice.ranking import ranked, simulated_is_enough, with_words
from memprof.advice.recorded_run import AdvisedRun, PhaseMaximum, highest, run_of
from memprof.advice.report_only import candidates_by_findings
from memprof.config.settings import Settings
from memprof.errors import UsageError
from memprof.report import Report
from memprof.report.advice import Advice
from memprof.vocabulary import Category

if TYPE_CHECKING:
    from memprof.plan.simulations import SimulatedRow
    from memprof.plan.subprocess_runner import Runner


@dataclass(frozen=True)
class Evaluated:
    """Hold the outcome of simulating changes.

    ``entries`` are a report's ``advice``, those that save most first; ``base`` is the unchanged run; ``simulated`` and
    ``estimated`` count how the changes were evaluated; ``refused`` says by candidate why one could not be simulated.
    """

    entries: list[Advice]
    base: SimulatedRow
    settings: Settings
    simulated: int
    estimated: int
    refused: dict[str, str] = field(default_factory=dict)


def evaluate_advice(
    report: Report,
    settings: Settings,
    machine: Runner,
    *,
    seconds: float = 120.0,
    batch: int = 2,
    clock: Callable[[], float] = time.monotonic,
) -> Evaluated:
    """Simulate the changes that the estimates say are worth it, the most promising first, while ``seconds`` last.

    Args:
        settings: of the unchanged run, ready to be simulated (:func:`memprof.config.from_recording.place_model`).
        seconds: how long it may take beside the unchanged run; what is left keeps its estimate.
        batch: how many are started together.

    Raises:
        InputError, UsageError: the unchanged run cannot be simulated.
    """
    start = clock()
    base = machine.run([settings])[0]
    run = run_of(report)
    known = estimate(run)
    waiting = promising = _promising(known, run)
    longest = clock() - start
    found: dict[str, Advice] = {}
    refused: dict[str, str] = {}
    # One round takes about as long as the longest so far: one that would end too late is not begun.
    while waiting and (began := clock()) - start + longest <= seconds:
        waiting = _first_first(waiting, _ranked_so_far(known, promising, found, run, report))
        now, waiting = waiting[:batch], waiting[batch:]
        rows = _simulated(machine, settings, [e.candidate for e in now], refused)
        for e in now:
            row = rows.get(e.candidate.id)
            if row:
                found[e.candidate.id] = _entry(e.candidate, base, row, report)
        longest = max(longest, clock() - began)
    entries = _ranked_so_far(known, promising, found, run, report)
    left = sum(row.basis == "estimated" for row in entries)
    return Evaluated(entries[:MOST], base, settings, len(found), left, refused)


def run_of_row(row: SimulatedRow, like: AdvisedRun, settings: Settings) -> AdvisedRun:
    """Turn a simulation's row into a run, so that estimates can be made of it too."""
    alive = row.phase_categories
    peaks = highest(PhaseMaximum(phase, n, alive.get(phase, {})) for phase, n in row.phases.items())
    own: dict[Category, int] = {}
    for peak in peaks:
        for category, n in peak.categories.items():
            own[category] = max(own.get(category, 0), n)
    return AdvisedRun(peaks=peaks, settings=settings, shape=like.shape, own_peaks=own, alloc_conf=settings.alloc_conf)


def _promising(known: Iterable[Estimate], run: AdvisedRun) -> list[Estimate]:
    """List what the estimates say is worth simulating, most first; then what no estimate covers."""
    hopeful = [e for e in known if e.candidate.changes and (e.candidate.effect is None or _hopeful(e, run))]
    return sorted(hopeful, key=lambda e: (e.candidate.effect is None, e.candidate.device, -int(e.saves or 0)))


def _ranked_so_far(
    known: Iterable[Estimate],
    promising: Iterable[Estimate],
    found: Mapping[str, Advice],
    run: AdvisedRun,
    report: Report,
) -> list[Advice]:
    """Rank what was simulated together with the estimates of what was not."""
    left = [e for e in promising if e.candidate.id not in found and e.saves is not None]
    idle = [e for e in idle_estimates(report, run) if e.candidate.id not in found]
    # A simulation runs the trainer's own loop: what the program's loop left behind is not in it.
    about = {candidate.id for candidate in candidates_by_findings(run)}
    beside = [e for e in known if e.candidate.id in about]
    estimates = [with_time(entry(e, run), report) for e in [*left, *beside, *idle] if worth(int(e.saves or 0), run)]
    simulated = [e for e in found.values() if worth(e.saves_bytes, run)]
    return with_words(ranked([*simulated, *estimates], report), report)


def _first_first(waiting: list[Estimate], entries: Sequence[Advice]) -> list[Estimate]:
    """Move the first thing to change to the front, so that its saving is simulated before any other."""
    first = entries[0].id if entries else ""
    return sorted(waiting, key=lambda e: e.candidate.id != first)


def _hopeful(found: Estimate, run: AdvisedRun) -> bool:
    """Tell whether to simulate a change: also where its estimate is just too small, or it is about idle memory."""
    return found.candidate.device or worth(2 * int(found.saves or 0), run)


def _simulated(
    machine: Runner, settings: Settings, candidates: list[Candidate], refused: dict[str, str]
) -> dict[str, SimulatedRow]:
    changed: list[tuple[Candidate, Settings]] = []
    for candidate in candidates:
        try:
            changed.append((candidate, settings.with_(**candidate.changes)))
        except UsageError as error:
            refused[candidate.id] = str(error)
    failed: dict[int, str] = {}
    rows = machine.run_each([s for _, s in changed], failed)
    refused.update({changed[i][0].id: why for i, why in failed.items()})
    return {c.id: row for (c, _), row in zip(changed, rows, strict=True) if row is not None}


def _entry(candidate: Candidate, base: SimulatedRow, row: SimulatedRow, report: Report) -> Advice:
    saves, device = base.peak_bytes - row.peak_bytes, None
    if base.device_peak_bytes is not None and row.device_peak_bytes is not None:
        device = base.device_peak_bytes - row.device_peak_bytes
    advice = msgspec.structs.replace(
        candidate.advice(max(0, (device or 0) if candidate.device else saves), "simulated"),
        device_saves_bytes=device,
        time_ratio=round(row.step_s / base.step_s, 3) if row.step_s and base.step_s else None,
        host_bytes=row.host_bytes - base.host_bytes if row.host_bytes > base.host_bytes else None,
        enough=msgspec.UNSET if report.oom is None else simulated_is_enough(row, report.oom),
    )
    if candidate.device:
        return advice
    after = max(0, report.peak.allocated_bytes - saves)
    if row.peak_phase != base.peak_phase:
        return msgspec.structs.replace(advice, peak_after_bytes=after, moves_to=row.peak_phase)
    less = {c: n - row.categories.get(c, 0) for c, n in base.categories.items()}
    return msgspec.structs.replace(advice, peak_after_bytes=after, takes={c: n for c, n in less.items() if n > 0})
