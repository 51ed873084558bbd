"""Keep what was found out of a large snapshot: the next command on the same file does not read it again.

An entry holds columns, timeline and attribution of one device, another the report of it: plain JSON and raw arrays, no
pickle. It is named by the snapshot's content, memprof's version and its source files. Entries lie in the user's cache
folder, which nobody else may read or write; an entry that is cut, damaged, another's or a link is deleted and made
again. ``MEMPROF_CACHE=0`` switches this off.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
import os
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np

from memprof._version import __version__
from memprof.analysis.cache.plain import TYPES, built, is_json, written
from memprof.analysis.host.growth import counters_beside
from memprof.attribution.result import Attribution
from memprof.files import cache_folder, write_whole
from memprof.snapshot.model import Snapshot
from memprof.timeline.timeline import Timeline

_MOST = 2 * 2**30  # bytes of all entries; the oldest go first
_MAGIC = b"memprof kept 1\n\0"
_SUFFIX = ".kept"
_CHUNK = 1 << 20
# Rooms whose source files decide what an entry holds.
_ROOMS = ("advice", "allocator", "analysis", "attribution", "config", "oom", "snapshot", "timeline")
_DAMAGED = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, MemoryError)

_T = TypeVar("_T")


class Parts(NamedTuple):
    """Hold what an entry keeps."""

    snapshot: Snapshot
    timeline: Timeline
    attribution: Attribution


def entry_at(path: Path, device: int | None, before: os.stat_result) -> Entry | None:
    """Return the entry of a large file's device; None where the user's folder is not theirs alone.

    Raises:
        OSError, RuntimeError: the file cannot be read, or there is no folder to keep anything in.
    """
    if not _is_private(folder := _folder()):
        return None
    return Entry(path, folder, f"{_digest(path)} {device} {__version__} {_sources()}", before)


class Entry:
    """Read and write what is kept of one snapshot's device: its parts, and its report."""

    def __init__(self, snapshot: Path, folder: Path, key: str, before: os.stat_result) -> None:
        self._snapshot, self._folder, self._key, self._before = snapshot, folder, key, before
        self.path = self._place(key)

    def read(self) -> Parts | None:
        """Return the kept parts; None where there are none that can be used."""
        return self._read(self._key, self._parts)

    def write(self, parts: Parts) -> None:
        """Keep ``parts``, if they can be; the oldest entries make room."""
        with suppress(*_DAMAGED):
            tables: list[Any] = []
            self._write(self._key, [written(part, tables) for part in parts], tables)

    def read_report(self, listed: int | None) -> dict[str, Any] | None:
        """Return the kept report with ``listed`` allocations; None where there is none that can be used."""
        return self._read(self._key_of_report(listed), self._report)

    def write_report(self, listed: int | None, report: dict[str, Any]) -> None:
        """Keep a report, if it can be."""
        with suppress(*_DAMAGED):
            if is_json(report):
                self._write(self._key_of_report(listed), {"report": report, "counters": self._counters(report)}, [])

    def _parts(self, tree: Any, tables: list[Any]) -> Parts:
        snapshot, timeline, attribution = (built(part, tables) for part in tree)
        return Parts(dataclasses.replace(snapshot, path=str(self._snapshot)), timeline, attribution)

    def _report(self, tree: Any, tables: list[Any]) -> dict[str, Any]:
        report: dict[str, Any] = tree["report"]
        if tree["counters"] != self._counters(report):
            raise ValueError("the run's counters have changed")
        return report

    def _key_of_report(self, listed: int | None) -> str:
        return f"{self._key} report {listed} {str(self._snapshot)!r}"  # which names its file

    def _counters(self, report: dict[str, Any]) -> list[int] | None:
        """Tell the file of counters beside the snapshot, of which a report says how host memory grew."""
        with suppress(OSError):
            beside = counters_beside(self._snapshot, int(report["source"]["rank"] or 0))
            return list(_identity(beside.stat()))
        return None

    def _place(self, key: str) -> Path:
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()}{_SUFFIX}"

    def _read(self, key: str, build: Callable[[Any, list[Any]], _T]) -> _T | None:
        path = self._place(key)
        try:
            found = build(*_tree(_content(path), key))
            os.utime(path)
            return found
        except FileNotFoundError:
            return None
        except _DAMAGED:
            with suppress(OSError):
                path.unlink()
            return None

    def _write(self, key: str, tree: Any, tables: list[Any]) -> None:
        size = sum(table.nbytes for table in tables)
        changed = _identity(self._snapshot.stat()) != _identity(self._before)
        if changed or size > _MOST // 2 or size > shutil.disk_usage(self._folder).free // 4:
            return
        head = {"key": key, "arrays": [[t.dtype.str, len(t)] for t in tables], "tree": tree}
        write_whole(self._place(key), lambda file: _fill(file, json.dumps(head).encode(), tables))
        _make_room(self._folder)


# ---- the folder ------------------------------------------------------------------------------------------------------


def _folder() -> Path:
    return Path(os.environ.get("MEMPROF_CACHE") or cache_folder()) / "recordings"


def _is_private(folder: Path) -> bool:
    """Make the folder; tell whether it is this user's own, no link, and closed to others."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    return _is_own(folder.lstat(), stat.S_ISDIR)


def _is_own(found: os.stat_result, kind: Any) -> bool:
    if not hasattr(os, "geteuid"):  # Windows: a user's folders are closed to others
        return bool(kind(found.st_mode))
    return bool(kind(found.st_mode)) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _make_room(folder: Path) -> None:
    """Delete the entries that were not used for longest, until the others are within the bound."""
    with os.scandir(folder) as listed:
        entries = [(entry.stat(follow_symlinks=False), entry.path) for entry in listed if entry.name.endswith(_SUFFIX)]
    total = 0
    for found, path in sorted(entries, key=lambda entry: -entry[0].st_mtime_ns):
        total += found.st_size
        if total > _MOST:
            with suppress(OSError):
                os.unlink(path)


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _sources() -> str:
    """Return a digest of the source files, so that an entry of other code is never read."""
    package = Path(__file__).parents[2]
    files = [*package.iterdir(), *(file for room in _ROOMS for file in (package / room).rglob("*.*"))]
    found = [file.stat() for file in sorted(files) if file.suffix in (".py", ".toml", ".json")]
    return hashlib.sha256(repr([(f.st_size, f.st_mtime_ns) for f in found]).encode()).hexdigest()


# ---- the file: what it is, the head's bytes, the head, the arrays, a checksum ----------------------------------------


def _fill(file: IO[bytes], head: bytes, tables: list[Any]) -> None:
    if hasattr(os, "fchmod"):
        os.fchmod(file.fileno(), 0o600)
    checksum = 0
    for part in _pieces(head, tables):
        checksum = zlib.crc32(part, checksum)
        file.write(part)
    file.write(checksum.to_bytes(8, "little"))


def _pieces(head: bytes, tables: list[Any]) -> Iterator[Any]:
    head += b" " * (-len(head) % 8)
    yield _MAGIC + len(head).to_bytes(8, "little") + head
    for table in tables:
        yield memoryview(table).cast("B") if len(table) else b""
        yield bytes(-table.nbytes % 8)


def _content(path: Path) -> mmap.mmap:
    """Return an entry's bytes; ValueError where they are not an entry's."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb", buffering=0) as file:
        if not _is_own(os.fstat(file.fileno()), stat.S_ISREG):
            raise ValueError("not an entry of this user's")
        # A copy of a hundred megabytes costs more than all that is done with it. Entries are renamed into place and
        # only ever unlinked, so that none shrinks under its readers; what is changed in the arrays stays here.
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    whole = len(content) > len(_MAGIC) + 16 and content[: len(_MAGIC)] == _MAGIC
    if not whole or zlib.crc32(memoryview(content)[:-8]) != int.from_bytes(content[-8:], "little"):
        raise ValueError("no entry, or a damaged one")
    return content


def _tree(content: mmap.mmap, key: str) -> tuple[Any, list[Any]]:
    """Return the plain data of an entry and its arrays."""
    at = len(_MAGIC) + 8
    head = int.from_bytes(content[len(_MAGIC) : at], "little")
    said = json.loads(content[at : at + head])
    if said["key"] != key:
        raise ValueError("the entry of another file")
    at += head
    tables: list[Any] = []
    for name, count in said["arrays"]:
        if name not in TYPES:
            raise ValueError("an array of another type")
        tables.append(np.frombuffer(content, name, count, at))
        at += -(-tables[-1].nbytes // 8) * 8
    return said["tree"], tables
