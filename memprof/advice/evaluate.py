"""Simulate changed runs and the unchanged one: the difference is what a change saves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memprof.advice.candidate import Candidate
from memprof.advice.estimate import MOST, Estimate, entry, estimate, idle_estimates, with_time, worth
from memprof.advice.ranking import ranked, simulated_is_enough, with_words
from memprof.advice.recorded_run import Peak, Run, highest, run_of
from memprof.advice.report_only import candidates_by_findings
from memprof.config.settings import Settings
from memprof.errors import UsageError

if TYPE_CHECKING:
    from memprof.plan.subprocess_runner import Runner


@dataclass(frozen=True)
class Evaluated:
    """Hold the outcome of simulating changes.

    ``entries`` are a report's ``advice``, those that save most first; ``base`` is the unchanged run's row (see
    :mod:`memprof.simulate.evaluate`); ``simulated`` and ``estimated`` count how the changes were evaluated; ``refused``
    says by candidate why one could not be simulated.
    """

    entries: list[dict[str, Any]]
    base: dict[str, Any]
    settings: Settings
    simulated: int
    estimated: int
    refused: dict[str, str] = field(default_factory=dict)


def evaluate_advice(
    report: Mapping[str, Any],
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
    found: dict[str, dict[str, Any]] = {}
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
    left = sum(row["basis"] == "estimated" for row in entries)
    return Evaluated(entries[:MOST], base, settings, len(found), left, refused)


def run_of_row(row: Mapping[str, Any], like: Run, settings: Settings) -> Run:
    """Turn a simulation's row into a run, so that estimates can be made of it too."""
    alive = row["phase_categories"]
    peaks = highest(Peak(phase, n, alive.get(phase, {})) for phase, n in row["phases"].items())
    own: dict[str, int] = {}
    for peak in peaks:
        for category, n in peak.categories.items():
            own[category] = max(own.get(category, 0), n)
    return Run(peaks=peaks, settings=settings, shape=like.shape, own_peaks=own, alloc_conf=settings.alloc_conf)


def _promising(known: Iterable[Estimate], run: Run) -> list[Estimate]:
    """List what the estimates say is worth simulating, most first; then what no estimate covers."""
    hopeful = [e for e in known if e.candidate.changes and (e.candidate.effect is None or _hopeful(e, run))]
    return sorted(hopeful, key=lambda e: (e.candidate.effect is None, e.candidate.device, -int(e.saves or 0)))


def _ranked_so_far(
    known: Iterable[Estimate],
    promising: Iterable[Estimate],
    found: Mapping[str, dict[str, Any]],
    run: Run,
    report: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Rank what was simulated together with the estimates of what was not."""
    left = [e for e in promising if e.candidate.id not in found and e.saves is not None]
    idle = [e for e in idle_estimates(report, run) if e.candidate.id not in found]
    # A simulation runs the trainer's own loop: what the program's loop left behind is not in it.
    about = {candidate.id for candidate in candidates_by_findings(run)}
    beside = [e for e in known if e.candidate.id in about]
    estimates = [with_time(entry(e, run), report) for e in [*left, *beside, *idle] if worth(int(e.saves or 0), run)]
    simulated = [e for e in found.values() if worth(e["saves_bytes"], run)]
    return with_words(ranked([*simulated, *estimates], report), report)


def _first_first(waiting: list[Estimate], entries: list[dict[str, Any]]) -> list[Estimate]:
    """Move the first thing to change to the front, so that its saving is simulated before any other."""
    first = entries[0]["id"] if entries else ""
    return sorted(waiting, key=lambda e: e.candidate.id != first)


def _hopeful(found: Estimate, run: Run) -> bool:
    """Tell whether to simulate a change: also where its estimate is just too small, or it is about idle memory."""
    return found.candidate.device or worth(2 * int(found.saves or 0), run)


def _simulated(
    machine: Runner, settings: Settings, candidates: list[Candidate], refused: dict[str, str]
) -> dict[str, dict[str, Any]]:
    changed: list[tuple[Candidate, Settings]] = []
    for candidate in candidates:
        try:
            changed.append((candidate, settings.with_(**candidate.changes)))
        except UsageError as error:
            refused[candidate.id] = str(error)
    failed: dict[int, str] = {}
    rows = machine.run([s for _, s in changed], failed)
    refused.update({changed[i][0].id: why for i, why in failed.items()})
    return {c.id: row for (c, _), row in zip(changed, rows, strict=True)}


def _entry(
    candidate: Candidate, base: Mapping[str, Any], row: Mapping[str, Any], report: Mapping[str, Any]
) -> dict[str, Any]:
    saves = int(base["peak_bytes"] - row["peak_bytes"])
    device = None
    if base["device_peak_bytes"] is not None and row["device_peak_bytes"] is not None:
        device = int(base["device_peak_bytes"] - row["device_peak_bytes"])
    data = candidate.entry(max(0, int(device or 0) if candidate.device else saves), "simulated")
    if report.get("oom"):
        data["enough"] = simulated_is_enough(row, report["oom"])
    if device is not None:
        data["device_saves_bytes"] = device
    if row.get("step_s") and base.get("step_s"):
        data["time_ratio"] = round(row["step_s"] / base["step_s"], 3)
    if row["host_bytes"] > base["host_bytes"]:
        data["host_bytes"] = int(row["host_bytes"] - base["host_bytes"])
    if not candidate.device:
        data["peak_after_bytes"] = max(0, int(report["peak"]["allocated_bytes"]) - saves)
        if row["peak_phase"] != base["peak_phase"]:
            data["moves_to"] = row["peak_phase"]
        else:
            was, now = base.get("categories", {}), row.get("categories", {})
            data["takes"] = {c: n - now.get(c, 0) for c, n in was.items() if n > now.get(c, 0)}
    return data
