"""What is kept of one simulation when a plan compares many: small, plain, cacheable."""

from __future__ import annotations

from typing import Any

from memprof.simulate.fit import Outcome, Verdict, evaluate
from memprof.simulate.gpus import find_gpu
from memprof.simulate.settings import Settings

__all__ = ["run_row", "summary_of"]


def run_row(settings: dict[str, Any], gpu: str | None) -> dict[str, Any]:
    """Simulate settings given as plain data (so that a worker process can) and return a row of plain data."""
    values = {**settings, "lora_target_modules": tuple(settings["lora_target_modules"])}
    card = find_gpu(gpu) if gpu is not None else None
    return summary_of(evaluate(Settings(**values), card))


def summary_of(outcome: Outcome) -> dict[str, Any]:
    """Peaks by phase, the largest category, the verdict and the host's share; sizes in bytes."""
    analysis = outcome.analysis
    categories = analysis.peak.categories
    phases: dict[str, int] = {}
    alive: dict[str, dict[str, int]] = {}
    for breakdown in analysis.phases:
        if breakdown.allocated_bytes > phases.get(breakdown.phase, -1):
            phases[breakdown.phase] = breakdown.allocated_bytes
            alive[breakdown.phase] = {name: size for name, size in breakdown.categories.items() if size}
    host = outcome.raw["memprof"]["host"]
    device_peak = analysis.device_peak
    return {
        "peak_bytes": analysis.peak.allocated_bytes,
        "peak_phase": analysis.peak.phase,
        "device_peak_bytes": _device_bytes(outcome.verdict, device_peak),
        "host_bytes": int(host["pinned_bytes"] + host["managed_bytes"]),
        "largest_category": max(categories, key=lambda name: categories[name]),
        "categories": {name: size for name, size in categories.items() if size},
        "phases": phases,
        "phase_categories": alive,
        "verdict": outcome.verdict.to_dict() if outcome.verdict is not None else None,
        "fits": outcome.verdict.fits if outcome.verdict is not None else None,
    }


def _device_bytes(verdict: Verdict | None, device_peak: Any) -> int | None:
    if verdict is not None:
        return verdict.needed_bytes
    return device_peak.reserved_bytes if device_peak is not None else None
