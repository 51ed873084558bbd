"""Find a run's recordings: in ``_memprof``, or in ``_memprof-2`` ... if earlier runs have the ones before."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from memprof.errors import InputError

RUN_FOLDER = "_memprof"
_NUMBER = re.compile(r"-[1-9]\d{0,5}$")
# How many other runs a sentence names.
_MOST_NAMED = 5
# What the callback and `memprof run` write; a folder's other files say nothing of a run.
_WRITTEN = ("step-*.rank-*", "report.html", "counters.rank-*.jsonl", "trainer-*")


def places_of_run(folder: Path) -> tuple[Path, Path]:
    """Return where the recordings of a trainer's output folder are: in itself, or in the newest run's folder in it."""
    return folder, next(iter(run_folders(folder)), folder / RUN_FOLDER)


def run_folders(folder: Path) -> list[Path]:
    """Return the folders of runs in a trainer's output folder, the newest run's first."""
    return [path for _, path in sorted(_numbered(folder / RUN_FOLDER).items(), reverse=True)]


def other_runs(place: Path) -> str:
    """Name the runs beside the one that is read from ``place``, in a sentence; "" if there are none.

    Args:
        place: a trainer's output folder, or a run's folder in it.
    """
    if not place.is_dir():
        return ""
    place = Path(os.path.abspath(place))
    own = _has_run(place)
    first = place.with_name(_NUMBER.sub("", place.name)) if own else place / RUN_FOLDER
    runs = {number: path for number, path in _numbered(first).items() if _has_run(path)}
    read = next((n for n, path in runs.items() if path == place), None) if own else max(runs, default=None)
    if read is None or len(runs) < 2:
        return ""
    others = [runs[n].name for n in sorted(runs, reverse=True) if n != read]
    more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
    which = "the newest" if read == max(runs) else "not the newest"
    return (
        f"{runs[read].name} is {which} of {len(runs)} runs in this folder. The others are "
        f"{', '.join(others[:_MOST_NAMED])}{more}."
    )


def _numbered(first: Path) -> dict[int, Path]:
    """Return the folders ``first``, ``first-2``, ``first-3`` ... that exist, by number."""
    found = {1: first} if first.is_dir() else {}
    try:
        names = os.listdir(first.parent)
    except OSError:
        return found
    numbers = re.compile(rf"{re.escape(first.name)}-([1-9]\d{{0,5}})")
    paths = {int(number[1]): first.parent / name for name in names if (number := numbers.fullmatch(name))}
    return found | {number: path for number, path in paths.items() if number > 1}


def file_of_run(folder: Path) -> Path:
    """Return the recording with the highest peak of a folder's newest run that has any, by the reports beside the
    snapshots; a file is itself.

    Without reports the newest snapshot is taken.

    Raises:
        InputError: the folder has neither.
    """
    if not folder.is_dir():
        return folder
    from memprof.report import Report
    from memprof.report.files import read_answer

    for place in (folder, *run_folders(folder)):
        snapshots = sorted(place.glob("*.pickle"))
        peaks: dict[Path, int] = {}
        for path in sorted(place.glob("*.json")):
            answer = read_answer(path)
            if isinstance(answer, Report):
                peaks[path] = answer.peak.allocated_bytes
        if peaks:
            best = max(peaks, key=lambda path: peaks[path])
            beside = best.with_suffix(".pickle")
            return beside if beside in snapshots else best
        if snapshots:
            return max(snapshots, key=lambda path: path.stat().st_mtime)
    raise InputError(f"{folder}: no snapshot (*.pickle) and no report (*.json) in it or in its _memprof.")


def unused_folder(folder: Path, began: float = math.inf, claimed: Collection[Path] = ()) -> Path:
    """Return ``folder``, or the first of ``folder-2``, ``folder-3`` ... that holds nothing of another run.

    Args:
        folder: where a run would write.
        began: when this process began, in seconds since the epoch; another rank of its run may have written what is
            newer. By default everything is of another run.
        claimed: absolute paths of folders that earlier runs of this process have written to.
    """
    chosen, number = folder, 1
    while _holds_older(chosen, began) or (Path(os.path.abspath(chosen)) in claimed and _has_run(chosen)):
        number += 1
        chosen = folder.with_name(f"{folder.name}-{number}")
    return chosen


def _holds_older(folder: Path, began: float) -> bool:
    return any(path.stat().st_mtime < began for path in _written_in(folder))


def _has_run(folder: Path) -> bool:
    return any(True for _ in _written_in(folder))


def _written_in(folder: Path) -> Iterator[Path]:
    """Yield what runs wrote to ``folder``."""
    return (path for pattern in _WRITTEN for path in folder.glob(pattern))
