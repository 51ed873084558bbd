"""Find a run's recordings: in ``_memprof``, or in ``_memprof-2`` ... if earlier runs have the ones before.

Which run is the newest is known by when it started, which its counters and reports say.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from memprof.errors import InputError
from memprof.files import refuse_special

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
    return _newest_first(_numbered(folder / RUN_FOLDER))


def earlier_runs(folders: Collection[Path]) -> set[Path]:
    """Return those of the folders with an earlier run than another one has: of ``a``, ``a-2``, ``b`` one of ``a``'s."""
    firsts = {folder for folder in folders if folder.with_name(_NUMBER.sub("", folder.name)) == folder}
    there = [{n: path for n, path in _numbered(first).items() if path in folders} for first in firsts]
    return {path for family in there for path in _newest_first(family)[1:]}


def run_started(folder: Path) -> float:
    """Return when the run in a folder began, in Unix seconds; 0 if the folder has nothing of a run.

    Its counters or reports say so; otherwise it is the time of the oldest file.
    """
    for path in sorted(folder.glob("counters.rank-*.jsonl")):
        with suppress(OSError, InputError, msgspec.MsgspecError):
            refuse_special(path)
            with open(path, "rb") as file:
                if (started := msgspec.json.decode(file.readline(1 << 20), type=_Counters).started) is not None:
                    return started
    for path in sorted(folder.glob("step-*.rank-*.json")):
        with suppress(OSError, InputError, msgspec.MsgspecError):
            refuse_special(path)
            started = msgspec.json.decode(path.read_bytes(), type=_Report).source.run_started
            return min(_times(folder)) if started is None else started
    return min(_times(folder), default=0.0)


class _Counters(msgspec.Struct):
    """The part of a counters file's first line that is read here."""

    started: float | None = None


class _Source(msgspec.Struct):
    run_started: float | None = None


class _Report(msgspec.Struct):
    """The part of a report that is read here."""

    source: _Source


def _newest_first(numbered: Mapping[int, Path]) -> list[Path]:
    if len(numbered) < 2:  # nothing to read
        return list(numbered.values())
    return [numbered[n] for n in sorted(numbered, key=lambda n: (run_started(numbered[n]), n), reverse=True)]


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
    runs = _newest_first({number: path for number, path in _numbered(first).items() if _has_run(path)})
    if len(runs) < 2 or (own and place not in runs):
        return ""
    read = place if own else runs[0]
    others = [path.name for path in runs if path != read]
    more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
    which = "the newest" if read == runs[0] else "not the newest"
    return (
        f"{read.name} is {which} of {len(runs)} runs in this folder. The others are "
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
        answers = {path: read_answer(path) for path in sorted(place.glob("*.json"))}
        reports = {path: answer for path, answer in answers.items() if isinstance(answer, Report)}
        if reports:
            newest = max((report.source for report in reports.values()), key=lambda source: source.run_order)
            of_run = [path for path, report in reports.items() if report.source.is_of_run(newest)]
            best = max(of_run, key=lambda path: reports[path].peak.allocated_bytes)
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
    return any(time < began for time in _times(folder))


def _times(folder: Path) -> Iterator[float]:
    """Yield when each file of a run in ``folder`` was last written."""
    for path in _written_in(folder):
        with suppress(OSError):  # it was deleted meanwhile
            yield path.stat().st_mtime


def _has_run(folder: Path) -> bool:
    return any(True for _ in _written_in(folder))


def _written_in(folder: Path) -> Iterator[Path]:
    """Yield what runs wrote to ``folder``."""
    return (path for pattern in _WRITTEN for path in folder.glob(pattern))
