"""Write and read the counters files of a run: one line of JSON per optimizer step, one file per rank.

They let a reader watch a run while it goes. ``_memprof/counters.rank-0.jsonl`` begins with a line that describes the
run; every later line holds the figures of one step. Sizes are bytes, ``null`` where unknown:

``step``, ``time`` (Unix seconds), ``recorded`` (whether allocations were being recorded), ``peak_allocated``,
``peak_reserved`` (highest since the line before), ``allocated``, ``reserved``, ``inactive_split``, ``cached``,
``non_torch``, ``host_rss``, ``host_rss_peak``, ``host_pinned``, ``host_anon``, ``host_files``, ``host_shared``,
``host_children``, ``host_arenas`` (when the step ended; ``recording/system/host.py`` says what each is), ``phases``
(``{phase: highest allocated bytes}``). A line with ``categories`` and ``groups`` follows when a recording has been
analysed (bytes at its peak), one with ``ended`` when the training is over.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from memprof.analysis.ranks.run_folders import places_of_run
from memprof.errors import InputError
from memprof.files import refuse_special, write_whole

SCHEMA = "memprof.counters/1"
_NAME = re.compile(r"counters\.rank-(\d{1,6})\.jsonl")
_TABLES = ("phases", "categories", "groups")
_SIZES = {
    "peak_allocated", "peak_reserved", "allocated", "reserved", "inactive_split", "cached", "non_torch", "host_rss",
    "host_rss_peak", "host_pinned", "host_anon", "host_files", "host_shared", "host_children", "host_arenas",
    "device_total_bytes",
}  # fmt: skip
_WRONG = object()  # in the place of a field's value that no counters file has
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

    def __init__(self, folder: Path, rank: int, about: Mapping[str, Any], max_bytes: int = MAX_BYTES) -> None:
        self.path = folder / f"counters.rank-{rank}.jsonl"
        self._max_bytes = max_bytes
        self._first = _line({"schema": SCHEMA, "rank": rank, "started": time.time(), **about})
        folder.mkdir(parents=True, exist_ok=True)
        self._replace([self._first])

    def append(self, row: Mapping[str, Any]) -> None:
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
            rows = [row for line in self.path.read_bytes().splitlines(keepends=True)[1:] if (row := _row(line))]
        except FileNotFoundError:
            return
        steps = [row for row in rows if "step" in row and "categories" not in row and "ended" not in row]
        others = [row for row in rows if "categories" in row][-1:] + [row for row in rows if "ended" in row]
        older, newest = steps[:-_NEWEST], steps[-_NEWEST:]
        room = self._max_bytes // 2 - sum(map(len, map(_line, (*newest, *others)))) - len(self._first)
        merged, together = older, 1
        while len(merged) > 1 and sum(map(len, map(_line, merged))) > room:
            together *= 2
            merged = _merged_by(together, older)
        self._replace([self._first, *map(_line, (*merged, *newest, *others))])

    def _replace(self, lines: list[bytes]) -> None:
        write_whole(self.path, b"".join(lines))
        self._bytes = sum(map(len, lines))


def _merged_by(together: int, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_merged(*group) for _, group in groupby(steps, lambda row: (row["step"] - 1) // together)]


def _merged(first: Mapping[str, Any], *later: Mapping[str, Any]) -> dict[str, Any]:
    """Return the line of several steps: the last one's, with the highest of each peak since the line before."""
    row = dict(first)
    for one in later:
        for name, value in one.items():
            if name == "phases" and isinstance(row.get(name), dict) and isinstance(value, dict):
                value = {p: max(row[name].get(p, 0), value.get(p, 0)) for p in {**row[name], **value}}
            elif name == "recorded" or (name in _PEAKS and value is not None):
                value = max(row.get(name) or 0, value)
            elif value is None and name in _PEAKS:
                value = row.get(name)
            row[name] = value
    return row


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


@dataclass(frozen=True)
class Counters:
    """Hold one rank's file: ``about`` is its first line, ``steps`` the lines of single steps, oldest first."""

    path: Path
    rank: int
    about: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    categories: dict[str, Any] | None = None
    ended: dict[str, Any] | None = None

    @property
    def newest(self) -> dict[str, Any] | None:
        """Return the line of the last step; None before the first."""
        return self.steps[-1] if self.steps else None

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the run."""
        size = self.about.get("world_size")
        return size if isinstance(size, int) else 1


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
    about = _row(first)
    if about is None or about.get("schema") != SCHEMA:
        raise InputError(f"{path}: not a counters file of this version of memprof ({SCHEMA}).")
    rank = about.get("rank")
    steps, categories, ended = [], None, None
    for row in filter(None, map(_row, rest.splitlines(keepends=True))):
        if "ended" in row:
            ended = row
        elif isinstance(row.get("categories"), dict):
            categories = row
        elif isinstance(row.get("step"), int):
            steps.append(row)
    return Counters(path, rank if isinstance(rank, int) else 0, about, steps, categories, ended)


def _row(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return {k: v for k, v in map(_checked, row.items()) if v is not _WRONG} if isinstance(row, dict) else None


def _checked(field: tuple[str, Any]) -> tuple[str, Any]:
    """Return a field as readers expect it: sizes that memory can have, tables of them, a step's number."""
    name, value = field
    if name in _TABLES:
        return name, {k: v for k, v in value.items() if _is_size(v)} if isinstance(value, dict) else _WRONG
    if name in _SIZES:
        return name, value if value is None or _is_size(value) else _WRONG
    return name, _WRONG if name in ("step", "rank") and type(value) is not int else value


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63
