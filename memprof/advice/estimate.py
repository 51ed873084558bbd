"""Advice from recorded sizes alone: instant, without torch; what a page says of a run as soon as it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memprof.advice.candidates import candidates_for
from memprof.advice.recorded_run import Candidate, Peak, Run, Sizes, highest
from memprof.advice.training_moments import refined
from memprof.config.from_recording import settings_like
from memprof.errors import InputError, UsageError

__all__ = ["MOST", "Estimate", "entry", "estimate", "estimated_advice", "idle_estimates", "run_of", "worth"]

# How many changes a page lists.
MOST = 8
# A change that saves less than this share of the peak is not worth a line.
_WORTH = 0.005
# Idle memory between blocks, of what is reserved, from which on it is called fragmentation.
_FRAGMENTED = 0.05


@dataclass(frozen=True)
class Estimate:
    """A candidate with what it would save at the peak, and the peak that is left; ``bytes`` is None if unknown."""

    candidate: Candidate
    saves: int | None
    left: Peak


def estimated_advice(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Entries of a report's ``advice`` (``basis: estimated``), those that save most first.

    Args:
        report: ``memprof.report/1``; its own ``advice`` is not looked at.
    """
    run = run_of(report)
    found = [e for e in estimate(run) if e.saves is not None and worth(e.saves, run)]
    found += idle_estimates(report, run)
    return [entry(e, run) for e in _ranked(found)[:MOST]]


def run_of(report: Mapping[str, Any]) -> Run:
    """What a report says of its run; settings and sizes where they can be known."""
    source, peak = report["source"], report["peak"]
    rows = [Peak(p["phase"], p["peak_bytes"], p["categories"]) for p in report["phases"]]
    whole = Peak(peak["phase"] or "other", peak["active_bytes"], peak["categories"])
    run = Run(
        peaks=highest([*rows, whole]),
        own_peaks=report["own_peaks"],
        details=peak["details"],
        idle_bytes=_idle(report),
        alloc_conf=str(source.get("alloc_conf") or ""),
    )
    try:
        likeness = settings_like(source)
        counted = (source.get("config") or {}).get("parameters")
        # A quantised layer's packed weight counts half its parameters.
        parameters = counted if isinstance(counted, int) and not likeness.settings.load_in_4bit else None
        sizes = Sizes.of(likeness.model, parameters)
    except (InputError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return run
    settings = likeness.settings
    return replace(run, settings=settings, sizes=sizes, alloc_conf=settings.alloc_conf or run.alloc_conf)


def estimate(run: Run) -> list[Estimate]:
    """Every candidate of a run with its estimate, in no order."""
    found = []
    for candidate in candidates_for(run):
        if not _possible(candidate, run):
            continue
        if candidate.effect is None:
            found.append(Estimate(candidate, None, run.peak))
            continue
        left = run.after(refined(candidate.effect, candidate.changes))
        found.append(Estimate(candidate, run.peak.bytes - left.bytes, left))
    return found


def _possible(candidate: Candidate, run: Run) -> bool:
    """Whether the changed settings go together: some shardings, for one, leave little choice."""
    if run.settings is None:
        return True
    try:
        run.settings.with_(**candidate.changes)
    except UsageError:
        return False
    return True


def worth(saves: int, run: Run) -> bool:
    """Whether a saving is large enough to be told of."""
    return saves > _WORTH * run.peak.bytes


def entry(found: Estimate, run: Run) -> dict[str, Any]:
    """An estimate as it stands in the JSON."""
    candidate, saves = found.candidate, int(found.saves or 0)
    data: dict[str, Any] = {
        "id": candidate.id,
        "action": candidate.action,
        "setting": candidate.setting,
        "saves_bytes": saves,
        "costs": candidate.costs,
        "exact": candidate.exact,
        "toll": candidate.toll,
        "basis": "estimated",
        "peak": "device" if candidate.device else "allocated",
    }
    if not candidate.device:
        data["peak_after_bytes"] = run.peak.bytes - saves
        if found.left.phase != run.peak.phase:
            data["moves_to"] = found.left.phase
    return data


def _ranked(found: list[Estimate]) -> list[Estimate]:
    return sorted(found, key=lambda e: (-int(e.saves or 0), e.candidate.toll))


def _idle(report: Mapping[str, Any]) -> int:
    """Free parts of segments in use, where there are enough of them to speak of."""
    peak, reserved = report["peak"], report["peak"]["reserved_bytes"]
    idle = int(peak["inactive_split_bytes"])
    return idle if reserved and idle > _FRAGMENTED * reserved else 0


def idle_estimates(report: Mapping[str, Any], run: Run) -> list[Estimate]:
    """What lies idle between blocks is the most that growing segments can give back; it is about the device's peak."""
    about = [c for c in candidates_for(run) if c.device and c.effect is not None]
    return [Estimate(c, run.idle_bytes, run.peak) for c in about if run.idle_bytes]
