"""Find a run's recordings: in ``_memprof``, or in ``_memprof-2`` where an earlier run has that."""

from __future__ import annotations

import re
from pathlib import Path

from memprof.errors import InputError

RUN_FOLDER = "_memprof"
_NUMBERED = re.compile(rf"{RUN_FOLDER}-(\d{{1,6}})")
# What the callback and `memprof run` write; a folder's other files say nothing of a run.
_WRITTEN = ("step-*.rank-*", "report.html", "counters.rank-*.jsonl", "trainer-*")


def places_of_run(folder: Path) -> tuple[Path, Path]:
    """Return where the recordings of a trainer's output folder are: in itself, or in the newest run's folder in it."""
    named = ((path, _NUMBERED.fullmatch(path.name)) for path in folder.glob(f"{RUN_FOLDER}-*"))
    numbered = {int(number[1]): path for path, number in named if number}
    newest = numbered[max(numbered)] if numbered else folder / RUN_FOLDER
    return folder, newest


def file_of_run(folder: Path) -> Path:
    """Return a folder's recording with the highest peak, by the reports beside the snapshots; a file is itself.

    Without reports the newest snapshot is taken.

    Raises:
        InputError: the folder has neither.
    """
    if not folder.is_dir():
        return folder
    from memprof.report import Report
    from memprof.report.files import read_answer

    places = places_of_run(folder)
    snapshots = [p for place in places for p in sorted(place.glob("*.pickle"))]
    peaks: dict[Path, int] = {}
    for path in (p for place in places for p in sorted(place.glob("*.json"))):
        answer = read_answer(path)
        if isinstance(answer, Report):
            peaks[path] = answer.peak.allocated_bytes
    if peaks:
        best = max(peaks, key=lambda path: peaks[path])
        beside = best.with_suffix(".pickle")
        return beside if beside in snapshots else best
    if not snapshots:
        raise InputError(f"{folder}: no snapshot (*.pickle) and no report (*.json) in it or in its _memprof.")
    return max(snapshots, key=lambda path: path.stat().st_mtime)


def unused_folder(folder: Path, began: float) -> Path:
    """Return ``folder``, or the first of ``folder-2``, ``folder-3`` ... that holds nothing of an earlier run.

    Args:
        folder: where a run would write.
        began: when this run began, in seconds since the epoch; what was written later is its own or another rank's.
    """
    chosen, number = folder, 1
    while _holds_older(chosen, began):
        number += 1
        chosen = folder.with_name(f"{folder.name}-{number}")
    return chosen


def _holds_older(folder: Path, began: float) -> bool:
    return any(path.stat().st_mtime < began for pattern in _WRITTEN for path in folder.glob(pattern))
