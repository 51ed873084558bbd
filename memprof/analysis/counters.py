"""Write and read the counters files of a run: one line of JSON per optimizer step, one file per rank.

They let a reader watch a run while it goes. ``_memprof/counters.rank-0.jsonl`` begins with a line that describes the
run; every later line holds the figures of one step (:mod:`memprof.report.counters` describes the lines). A line with
categories follows when a recording has been analysed, one that says so when the training is over.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import msgspec

from memprof.analysis.ranks.run_folders import places_of_run
from memprof.errors import InputError
from memprof.files import refuse_special, write_whole
from memprof.report.base import known
from memprof.report.counters import CountersStart, Line, RecordedPeak, StepCounters, TrainingEnd, read_line

SCHEMA = str(CountersStart.__struct_config__.tag)
_NAME = re.compile(r"counters\.rank-(\d{1,6})\.jsonl")
# Lines that are not merged with others.
_NEWEST = 8
# Bytes of a file. In a larger one older lines are merged until it is half as large.
MAX_BYTES = 2**20
_READ_BYTES = 2**25
# Sizes that are highest values: of two lines the higher one counts, of all others the later one.
_PEAKS = ("peak_allocated", "peak_reserved", "host_rss_peak")


class CountersFile:
    """Write the file of one rank. Readers pass over a last line that a killed run left half.

    Raises:
        OSError: from any method, when the file cannot be written.
    """

    def __init__(self, folder: Path, about: CountersStart, max_bytes: int = MAX_BYTES) -> None:
        self.path = folder / f"counters.rank-{known(about.rank) or 0}.jsonl"
        self._max_bytes = max_bytes
        self._first = _line(about)
        folder.mkdir(parents=True, exist_ok=True)
        self._replace([self._first])

    def append(self, row: StepCounters | RecordedPeak | TrainingEnd) -> None:
        """Append one line; into a new file if somebody has deleted it."""
        line = _line(row)
        if self._bytes + len(line) > self._max_bytes:
            self._thin()
        try:
            self._write(line)
        except FileNotFoundError:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._replace([self._first])
            self._write(line)

    def _write(self, line: bytes) -> None:
        flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        file = os.open(self.path, flags)  # refuses a link or pipe that somebody else put in its place
        try:
            if (written := os.write(file, line)) != len(line):  # the disk is full: no half line stays
                os.ftruncate(file, os.fstat(file).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(file)
        self._bytes += len(line)

    def _thin(self) -> None:
        """Merge older steps until the file has half of its bytes: a long run keeps its whole course, evenly."""
        try:
            rows = [row for line in self.path.read_bytes().splitlines(keepends=True)[1:] if (row := read_line(line))]
        except FileNotFoundError:
            return
        steps = [row for row in rows if isinstance(row, StepCounters)]
        peaks = [row for row in rows if isinstance(row, RecordedPeak)]
        others: list[Line] = [*peaks[-1:], *(row for row in rows if isinstance(row, TrainingEnd))]
        older, newest = steps[:-_NEWEST], steps[-_NEWEST:]
        room = self._max_bytes // 2 - _bytes_of([*newest, *others]) - len(self._first)
        merged, together = older, 1
        while len(merged) > 1 and _bytes_of(merged) > room:
            together *= 2
            merged = _merged_by(together, older)
        lines: list[Line] = [*merged, *newest, *others]
        self._replace([self._first, *map(_line, lines)])

    def _replace(self, lines: list[bytes]) -> None:
        write_whole(self.path, b"".join(lines))
        self._bytes = sum(map(len, lines))


def _merged_by(together: int, steps: list[StepCounters]) -> list[StepCounters]:
    return [_merged(*group) for _, group in groupby(steps, lambda row: (row.step - 1) // together)]


def _merged(first: StepCounters, *later: StepCounters) -> StepCounters:
    """Return the line of several steps: the last one's, with the highest of each peak since the line before."""
    row = first
    for one in later:
        changes = {name: value for name in one.__struct_fields__ if (value := getattr(one, name)) is not msgspec.UNSET}
        for name in _PEAKS:
            sizes = [size for size in (row.size(name), one.size(name)) if size is not None]
            if sizes:
                changes[name] = max(sizes)
        if row.recorded is True:
            changes["recorded"] = True
        before, after = known(row.phases), known(one.phases)
        if before and after is not None:
            changes["phases"] = {p: max(before.get(p, 0), after.get(p, 0)) for p in {**before, **after}}
        row = msgspec.structs.replace(row, **changes)
    return row


def _bytes_of(rows: Sequence[Line]) -> int:
    return sum(len(_line(row)) for row in rows)


def _line(row: Line) -> bytes:
    return msgspec.json.encode(row) + b"\n"


@dataclass(frozen=True)
class Counters:
    """Hold one rank's file: ``about`` is its first line, ``steps`` the lines of single steps, oldest first."""

    path: Path
    about: CountersStart
    steps: list[StepCounters] = field(default_factory=list)
    recorded: RecordedPeak | None = None
    ended: TrainingEnd | None = None

    @property
    def newest(self) -> StepCounters | None:
        """Return the line of the last step; None before the first."""
        return self.steps[-1] if self.steps else None

    @property
    def rank(self) -> int:
        return known(self.about.rank) or 0

    @property
    def run_id(self) -> str | None:
        return known(self.about.run_id)

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the run."""
        return known(self.about.world_size) or 1


def find_counters(place: Path) -> list[Path]:
    """Find the counters files of a run, by rank: in ``place``, in ``_memprof`` below it, or ``place`` itself.

    Raises:
        InputError: there are none.
    """
    if place.is_file():
        return [place]
    for folder in places_of_run(place):
        try:
            found = [(int(m.group(1)), p) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name))]
        except OSError:
            continue
        if found:
            return [path for _, path in sorted(found)]
    if not place.exists():
        raise InputError(f"{place}: no such folder.")
    raise InputError(
        f"{place}: no counters.rank-*.jsonl there or in its _memprof; name the output_dir of a run with the callback."
    )


def read_run(place: Path) -> list[Counters]:
    """Read the counters of every rank of a run, by rank; files that an earlier run left in the folder are left out.

    Raises:
        InputError: there are none, or a file cannot be used.
    """
    ranks = [read_counters(path) for path in find_counters(place)]
    newest = max(ranks, key=lambda rank: (rank.run_id is not None, known(rank.about.started) or 0.0)).run_id
    return [rank for rank in ranks if newest is None or rank.run_id in (None, newest)]


def read_counters(path: Path, newest_bytes: int | None = None) -> Counters:
    """Read one file, or only its first line and the lines in its last ``newest_bytes``.

    Incomplete or damaged lines are skipped, because the run may be writing.

    Raises:
        InputError: the file cannot be read, or is not a counters file of this version.
    """
    try:
        refuse_special(path)
        with open(path, "rb") as file:
            first = file.readline(1 << 20)
            size = os.fstat(file.fileno()).st_size
            if newest_bytes is not None and size - newest_bytes > len(first):
                file.seek(size - newest_bytes)
                file.readline()
            rest = file.read(_READ_BYTES)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}).") from None
    about = read_line(first)
    if not isinstance(about, CountersStart):
        raise InputError(f"{path}: not a counters file of this version of memprof ({SCHEMA}).")
    found = Counters(path, about)
    recorded, ended = None, None
    for row in map(read_line, rest.splitlines(keepends=True)):
        if isinstance(row, TrainingEnd):
            ended = row
        elif isinstance(row, RecordedPeak):
            recorded = row
        elif isinstance(row, StepCounters):
            found.steps.append(row)
    return replace(found, recorded=recorded, ended=ended)
