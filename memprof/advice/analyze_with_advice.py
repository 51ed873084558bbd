"""Analyse a snapshot, with the estimates of advice in its report: ``memprof.analyze``."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memprof.analysis.analysis import Analysis
    from memprof.analysis.cache.entries import Entry
    from memprof.analysis.views import Views
    from memprof.attribution.rules import RuleSet
    from memprof.snapshot import Snapshot


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
    from memprof.analysis.analysis import analyze as analyze_without_advice

    return analyze_without_advice(snapshot, device, rules, _advice, _outlook)


# What a kept report or an explanation does not need is imported where it is called: a fifth of such a command.


def _advice(report: Mapping[str, Any], analysis: Views) -> list[dict[str, Any]]:
    from memprof.advice.estimate import estimated_advice

    return estimated_advice(report, analysis)


def _outlook(report: Mapping[str, Any]) -> dict[str, Any] | None:
    from memprof.advice.after_oom import look_ahead

    return look_ahead(report)


def analyze_once(path: Path, device: int | None = None) -> Analysis:
    """Return what :func:`analyze` does, from what an earlier call kept of a large file.

    Raises:
        InputError, UsageError: as :func:`analyze`.
    """
    from memprof.analysis.cache import entry_of

    return _analyzed(path, device, entry_of(path, device))


def _analyzed(path: Path, device: int | None, entry: Entry | None) -> Analysis:
    from memprof.analysis.analysis import Analysis

    parts = entry.read() if entry is not None else None
    if parts is not None:
        return Analysis(*parts, _advice, _outlook)
    analysis = analyze(path, device)
    if entry is not None:
        from memprof.analysis.cache.entries import Parts

        entry.write(Parts(analysis.snapshot, analysis.timeline, analysis.attribution))
    return analysis


@dataclass(frozen=True)
class ReportOf:
    """Make the report of a snapshot's file, in any process: the answer is plain data.

    Attributes:
        device: as of :func:`analyze`.
        rules: a file of stack rules.
        allocations: how many of those alive at the peak are listed; None for all.
    """

    device: int | None = None
    rules: Path | None = None
    allocations: int | None = 50

    def __call__(self, path: Path) -> dict[str, Any]:
        """Return the report of the snapshot at ``path``.

        Raises:
            InputError: the file, or the file of rules, cannot be used.
            UsageError: the snapshot holds nothing of the device.
        """
        return self.of(self.analysis(path), path)

    def once(self, path: Path) -> dict[str, Any]:
        """Return what calling does, from what an earlier call kept of a large file."""
        from memprof.analysis.cache import entry_of

        entry = entry_of(path, self.device) if self.rules is None else None
        if entry is None:
            return self(path)
        kept = entry.read_report(self.allocations)
        if kept is not None:
            return kept
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            report = self.of(_analyzed(path, self.device, entry), path)
        for warning in told:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        if not told:  # a kept report would keep silent
            entry.write_report(self.allocations, report)
        return report

    def analysis(self, path: Path) -> Analysis:
        """Attribute the snapshot at ``path``; raises as calling does."""
        if self.rules is None:
            return analyze(path, self.device)
        from memprof.attribution.rules import load_rules

        return analyze(path, self.device, load_rules(self.rules))

    def of(self, analysis: Analysis, path: Path) -> dict[str, Any]:
        """Return the report of what was read from ``path``, with the file's size: a report belongs to its file."""
        report = analysis.to_dict(self.allocations)
        report["source"]["file_bytes"] = path.stat().st_size
        return report
