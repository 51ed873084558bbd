"""Analyse a snapshot, with the estimates of advice in its report: ``memprof.analyze``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from memprof.advice.ahead import look_ahead
from memprof.advice.estimate import estimated_advice
from memprof.analysis.analysis import Analysis
from memprof.analysis.analysis import analyze as analyze_without_advice

if TYPE_CHECKING:
    from memprof.attribution.rules import RuleSet
    from memprof.snapshot import Snapshot

__all__ = ["analyze"]


def analyze(snapshot: Snapshot | str | Path, device: int | None = None, rules: RuleSet | None = None) -> Analysis:
    """Attribute every byte of a snapshot (or of the file at a path).

    Args:
        snapshot: what :func:`memprof.load_snapshot` returned, or a path to load.
        device: index of the device; default: the one that ran out of memory, else that with the highest peak.
        rules: stack rules to use instead of the shipped ones.

    Raises:
        InputError: the file cannot be used.
        UsageError: the snapshot holds nothing of ``device``.
    """
    return analyze_without_advice(snapshot, device, rules, estimated_advice, look_ahead)
