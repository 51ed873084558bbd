"""A run given on the command line: a snapshot, a folder of recordings, or a report's JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memprof.cli.options import analysed
from memprof.errors import InputError

if TYPE_CHECKING:
    from memprof.analysis import Analysis

__all__ = ["GivenRun", "read_run"]


@dataclass(frozen=True)
class GivenRun:
    """A run's report; its analysis where the file was a snapshot."""

    path: Path
    report: dict[str, Any]
    analysis: Analysis | None


def read_run(path: Path, device: int | None = None) -> GivenRun:
    """The run at ``path``; of a folder of the callback's, the recording with the highest peak.

    Raises:
        InputError: there is none, or it cannot be used.
        UsageError: the snapshot holds nothing of ``device``.
    """
    from memprof.reportfile import read_memprof_json

    if path.is_dir():
        path = _highest_of(path)
    data = read_memprof_json(path)
    if data is None:
        analysis = analysed(path, device, None)
        return GivenRun(path, analysis.to_dict(), analysis)
    if data["schema"] != "memprof.report/1":
        raise InputError(f"{path}: {data['schema']!r:.60} is no report; give a snapshot or memprof.report/1.")
    from memprof.reports.json import validate

    try:
        validate(data)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return GivenRun(path, data, None)


def _highest_of(folder: Path) -> Path:
    """By the reports beside the snapshots; where there are none, the newest snapshot."""
    from memprof.reportfile import read_memprof_json

    places = (folder, folder / "_memprof")
    snapshots = [p for place in places for p in sorted(place.glob("*.pickle"))]
    peaks: dict[Path, int] = {}
    for path in (p for place in places for p in sorted(place.glob("*.json"))):
        data = read_memprof_json(path)
        if data is not None and data["schema"] == "memprof.report/1":
            peaks[path] = int(data["peak"]["allocated_bytes"])
    if peaks:
        best = max(peaks, key=lambda path: peaks[path])
        beside = best.with_suffix(".pickle")
        return beside if beside in snapshots else best
    if not snapshots:
        raise InputError(f"{folder}: no snapshot (*.pickle) and no report (*.json) in it or in its _memprof.")
    return max(snapshots, key=lambda path: path.stat().st_mtime)
