"""Describe *What would lower the peak*: a report's ``advice``."""

from __future__ import annotations

from memprof.reports.document.text import phase_label

from memprof.report import Report
from memprof.report.advice import Advice
from memprof.units import gib
from memprof.vocabulary import Kind

NOTHING_KNOWN = "memprof knows no change of settings that would lower this peak."


def whole_step(entry: Advice, report: Report) -> int | None:
    """Return what a step that ran out of memory needs in all, if the saving counts from that and not from the peak."""
    after = entry.peak_after_bytes
    if after is None or entry.basis != "estimated" or not (report.oom and report.oom.ahead):
        return None
    whole = entry.saves_bytes + after
    return whole if whole > report.peak.allocated_bytes else None


def advice_words(entry: Advice) -> str:
    """Say what a change costs, what limits it, and what else it changes."""
    words = [entry.costs]
    if entry.moves_to:
        left = f", at {gib(entry.peak_after_bytes)} GiB" if entry.peak_after_bytes is not None else ""
        words.append(
            f"It saves no more because the next highest peak is in {phase_label(entry.moves_to).lower()}{left}."
        )
    if entry.peak == "device":
        most = "up to " if entry.basis == "estimated" else ""
        words.append(f"It lowers reserved memory only, by {most}{gib(entry.saves_bytes)} GiB.")
    elif (device := entry.device_saves_bytes) is not None and device != entry.saves_bytes:
        words.append(f"The device's peak changes by {gib(-device)} GiB.")
    if entry.host_bytes:
        words.append(f"Uses {gib(entry.host_bytes)} GiB of host memory.")
    return " ".join(filter(None, [*words, _time(entry.time_ratio)]))


def _time(ratio: float | None) -> str:
    """Say what a change costs in time, or that nothing estimates it."""
    if not ratio:
        return "Time not estimated."
    change = round(100 * (ratio - 1))
    if not change:
        return "Time of a step: about the same (estimated)."
    return f"Time of a step: {'+' if change > 0 else '−'}{abs(change)}% (estimated)."


def advice_basis(report: Report) -> str:
    """Say how the savings were found, and how far off the simulator was on the unchanged run."""
    changes, unchanged = report.advice, report.unchanged
    if not changes:
        return ""
    first = "the one to try first on top, the others by what each saves at the peak"
    order = first if len(changes) > 1 else "at the peak"
    if all(change.basis != "simulated" for change in changes):
        whole = next(filter(None, (whole_step(change, report) for change in changes)), None)
        counted = f"; counted from the {gib(whole)} GiB that the step needs in all" if whole else ""
        return f"{order}, estimated from recorded sizes{counted}"
    words = f"{order}, found by simulating the changed run"
    if unchanged and report.source.kind != Kind.SIMULATED:
        error = 100 * (unchanged.simulated_bytes - unchanged.measured_bytes) / max(unchanged.measured_bytes, 1)
        where = "above" if error > 0 else "below"
        words += f"; simulated unchanged, this run peaks {abs(error):.1f}% {where} what was measured"
    return words
