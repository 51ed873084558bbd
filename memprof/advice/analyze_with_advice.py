"""Analyse a snapshot, with the estimates of advice in its report: ``memprof.analyze``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from memprof.errors import InputError

if TYPE_CHECKING:
    from memprof.analysis.analysis import Analysis
    from memprof.analysis.views import Views
    from memprof.attribution.rules import RuleSet
    from memprof.report import Report
    from memprof.report.advice import Advice
    from memprof.report.run import StillAhead
    from memprof.snapshot import Snapshot


def analyze(snapshot: Snapshot | str | Path, device: int | None = None, rules: RuleSet | None = None) -> Analysis:
    """Attribute every byte of a snapshot, of the file at a path, or of a run's folder.

    Args:
        snapshot: what :func:`memprof.load_snapshot` returned, or a path or URL to load. Of a folder, the snapshot with
            the highest peak of the newest run is loaded, as ``memprof explain`` does.
        device: index of the device; default: the one that ran out of memory, else that with the highest peak.
        rules: stack rules to use instead of the shipped ones.

    Raises:
        InputError: the file cannot be used, or the folder has no snapshot.
        UsageError: the snapshot holds nothing of ``device``.
    """
    from memprof.analysis.analysis import analyze as analyze_without_advice
    from memprof.snapshot import Snapshot

    if not isinstance(snapshot, Snapshot):
        snapshot = _snapshot_in(snapshot)
    return analyze_without_advice(snapshot, device, rules, _advice, _outlook)


def _snapshot_in(given: str | Path) -> Path:
    """Return the snapshot to read of a run's folder; a file is itself.

    Raises:
        InputError: the folder has no snapshot.
    """
    from memprof.analysis.ranks.run_folders import file_of_run
    from memprof.snapshot.reader import path_of

    place = path_of(given)
    found = file_of_run(place)
    if found != place and found.suffix == ".json":
        raise InputError(f"{given}: has reports and no snapshot (*.pickle); memprof report reads {found.name}.")
    return found


# What an explanation does not need is imported where it is called: a fifth of such a command.


def _advice(report: Report, analysis: Views) -> tuple[Advice, ...]:
    from memprof.advice.estimate import estimated_advice

    return estimated_advice(report, analysis)


def _outlook(report: Report) -> StillAhead | None:
    from memprof.advice.after_oom import look_ahead

    return look_ahead(report)


@dataclass(frozen=True)
class ReportBuilder:
    """Builds the report of a snapshot's file, in any process.

    Attributes:
        device: as of :func:`analyze`.
        rules: a file of stack rules.
        allocations: how many of those alive at the peak are listed; None for all.
        number: which snapshot of a file with several; as of :func:`memprof.load_snapshot`.
        advice: whether the report has advice, and a headline that knows of it: a third of the work for a small file.
    """

    device: int | None = None
    rules: Path | None = None
    allocations: int | None = 50
    number: int | None = None
    advice: bool = True

    def __call__(self, path: Path) -> Report:
        """Return the report of the snapshot at ``path``.

        Raises:
            InputError: the file, or the file of rules, cannot be used.
            UsageError: the snapshot holds nothing of the device.
        """
        return self.report_of(self.analysis(path), path)

    def analysis(self, path: Path) -> Analysis:
        """Attribute the snapshot at ``path``; raises as calling does."""
        from memprof.analysis.analysis import analyze as analyze_without_advice
        from memprof.attribution.rules import load_rules
        from memprof.snapshot import load_snapshot

        rules = None if self.rules is None else load_rules(self.rules)
        advisor = _advice if self.advice else None
        return analyze_without_advice(load_snapshot(path, self.number), self.device, rules, advisor, _outlook)

    def report_of(self, analysis: Analysis, path: Path) -> Report:
        """Return the report of what was read from ``path``, with the file's size: a report belongs to its file."""
        report = analysis.report_listing(self.allocations)
        return replace(report, source=replace(report.source, file_bytes=path.stat().st_size))
