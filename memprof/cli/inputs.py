"""Turn what a command line names into reports: find the files, read them, attribute snapshots.

:func:`read_run` reads one run, :func:`analysed` and :func:`known_report` a single file. Ranks are read by
:mod:`memprof.analysis.ranks.reading`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memprof.cli.progress import working
from memprof.errors import UsageError

if TYPE_CHECKING:
    from memprof.analysis.analysis import Analysis
    from memprof.report import Report

# From this file size on, faulting freed memory in again is a fifth of a command's CPU time.
_LARGE = 256 << 20
# Parameters of mallopt(3) of the GNU C library, and their values: nothing by mmap, nothing given back to the system,
# and the heap grown by so many bytes at once.
_MMAP_MAX, _TRIM_THRESHOLD, _TOP_PAD = -4, -1, -2
_NEVER, _AT_ONCE = (1 << 31) - 1, 256 << 20


@dataclass(frozen=True)
class GivenRun:
    """A run's report; ``analysis`` is what it was made of, None where only the report's JSON is there."""

    path: Path
    report: Report
    analysis: Analysis | None


# ---- one run ---------------------------------------------------------------------------------------------------------


def analysed(path: Path, device: int | None = None, rules: Path | None = None, number: int | None = None) -> Analysis:
    """Read the snapshot at ``path``, of several in the file the one of this ``number``, and attribute it. InputError if
    a file cannot be used, UsageError if the snapshot has nothing of ``device``."""
    from memprof.advice.analyze_with_advice import ReportBuilder

    reuse_freed_memory(path)
    with working(f"Reading {path.name}", path):
        return ReportBuilder(device, rules, number=number).analysis(path)


def read_run(path: Path, device: int | None = None, number: int | None = None) -> GivenRun:
    """Read the run at ``path``: a snapshot, a report's JSON, or the recording with the highest peak in a folder. Errors
    as of :func:`analysed`."""
    path = chosen_file(path)
    report = known_report(path)
    if report is not None and number is not None:
        raise UsageError("--snapshot needs the snapshot; this is a report's JSON.")
    if report is not None:
        return GivenRun(path, report, None)
    analysis = analysed(path, device, number=number)
    return GivenRun(path, analysis.report, analysis)


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


def known_report(path: Path) -> Report | None:
    """Read a report's JSON; None if the file is a snapshot. InputError for another answer of memprof's, or if it is not
    as its schema says."""
    from memprof.report.files import read_report

    return read_report(path)


def reuse_freed_memory(path: Path) -> None:
    """Tell the C library to keep freed memory, where ``path`` is a large file; other C libraries are left alone.

    Measured on 5 million events: 6.6 instead of 7.8 CPU seconds and 5% more memory, with the same answer. Only for a
    process of the command line's own: the setting holds until the process ends.
    """
    if "://" in str(path):
        return
    with suppress(OSError):
        if path.stat().st_size < _LARGE:
            return
        import ctypes

        with suppress(AttributeError, TypeError):  # no such function; on Windows, no such library
            mallopt = ctypes.CDLL(None).mallopt
            for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _AT_ONCE)):
                mallopt(parameter, value)
