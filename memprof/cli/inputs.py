"""Turn what a command line names into reports: find the files, read them, attribute snapshots.

:func:`read_run` reads one run, :func:`analysed` and :func:`known_report` a single file. Ranks are read by
:mod:`memprof.analysis.ranks.reading`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memprof.cli.progress import working
from memprof.errors import InputError

if TYPE_CHECKING:
    from memprof.analysis.analysis import Analysis

_REPORT = "memprof.report/1"


@dataclass(frozen=True)
class GivenRun:
    """A run's report; ``analysis`` is what it was made of, None where only the report's JSON is there."""

    path: Path
    report: dict[str, Any]
    analysis: Analysis | None


# ---- one run ---------------------------------------------------------------------------------------------------------


def analysed(path: Path, device: int | None = None, rules: Path | None = None) -> Analysis:
    """Read the snapshot at ``path`` and attribute it; a large one is read once (:mod:`memprof.analysis.cache`).
    InputError where a file cannot be used, UsageError where the snapshot holds nothing of ``device``."""
    from memprof.advice.analyze_with_advice import ReportOf, analyze_once

    with working(f"Reading {path.name}"):
        return analyze_once(path, device) if rules is None else ReportOf(device, rules).analysis(path)


def read_run(path: Path, device: int | None = None) -> GivenRun:
    """Read the run at ``path``: a snapshot, a report's JSON, or the recording with the highest peak in a folder. Errors
    as of :func:`analysed`."""
    path = chosen_file(path)
    report = known_report(path)
    if report is not None:
        return GivenRun(path, report, None)
    analysis = analysed(path, device)
    return GivenRun(path, analysis.to_dict(), analysis)


def chosen_file(path: Path) -> Path:
    """Return the file to read: of a folder the recording with the highest peak. Name the folder's other runs on stderr.
    InputError for a folder without recordings."""
    from memprof.analysis.ranks.run_folders import file_of_run

    found = file_of_run(path)
    if found != path:
        name_other_runs(found.parent)
    return found


def name_other_runs(folder: Path) -> None:
    """Print on stderr which other runs there are beside the one in ``folder``."""
    from memprof.analysis.ranks.run_folders import other_runs

    if others := other_runs(folder):
        click.echo(f"memprof: {others}", err=True)


def known_report(path: Path) -> dict[str, Any] | None:
    """Read a report's JSON; None where the file is a snapshot. InputError for another answer of memprof's, or what is
    not as its schema says."""
    from memprof.analysis.report_files import read_memprof_json

    data = read_memprof_json(path)
    if data is None:
        return None
    if data["schema"] != _REPORT:
        raise InputError(f"{path}: {data['schema']!r:.60} is no report; give a snapshot or {_REPORT}.")
    return data
