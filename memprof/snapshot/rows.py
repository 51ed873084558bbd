"""Take the events of a snapshot as the columns that the native scanner makes of its pickle.

The result equals that of :mod:`memprof.snapshot.columns`, which reads the same from dicts, to the last id.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memprof._native import scanner
from memprof.foreign import SnapshotFile
from memprof.snapshot.columns import Interner, action_code, check_range, note_unknown, times_filled
from memprof.snapshot.model import I32, I64, Action, Trace
from memprof.snapshot.packed import PIECE, physical_memory, unpacked

# Bytes of memory per byte of file while a snapshot is scanned; a hostile file can reach some ten times as many.
_BYTES_PER_BYTE = 2

# Bits of a row's flags: which of the keys that only some releases write it has, and whether its time is a number.
_HAS_TIME, _KNOWS_TIME, _HAS_POOL, _HAS_METADATA, _HAS_CONTEXT = 1, 2, 4, 8, 16
_KEYS = {"time_us": _HAS_TIME, "user_metadata": _HAS_METADATA, "compile_context": _HAS_CONTEXT}


def scan_file(path: Path) -> tuple[SnapshotFile, EventRows] | None:
    """Return a file's snapshot without its events, and these as rows; None where the Python reader has to read it:
    whatever went wrong, it reads the same, or says what is wrong with the file."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return None
        with path.open("rb") as file:
            return scan(unpacked(iter(partial(file.read, PIECE), b""), status.st_size, str(path)))
    except Exception:
        return None


def scan(pieces: Iterable[bytes]) -> tuple[SnapshotFile, EventRows] | None:
    """Do :func:`scan_file` on the pieces of a pickle."""
    native, left = scanner(), physical_memory() // _BYTES_PER_BYTE
    if native is None:
        return None
    for piece in pieces:
        left -= len(piece)
        if left < 0 or not native.feed(piece):
            return None
    found = native.finish()
    return None if found is None else (found[0], _rows(found[1]))


@dataclass(frozen=True)
class EventRows:
    """Hold events, one a row. ``action``, ``pool``, ``stack`` and ``metadata`` are positions in lists; -1: none."""

    actions: list[str]
    pools: list[tuple[int, int]]
    stacks: list[list[Any]]
    texts: list[str]
    action: NDArray[np.uint8]
    flags: NDArray[np.uint8]
    pool: I32
    stack: I32
    metadata: I32
    address: I64
    size: I64
    stream: I64
    time_us: I64

    def __len__(self) -> int:
        return len(self.action)

    def of(self, trace: tuple[int, int]) -> EventRows:
        """Return the rows of one device's trace."""
        rows = slice(*trace)
        return replace(self, **{name: getattr(self, name)[rows] for name in _COLUMNS})

    def last_event(self, traces: list[tuple[int, int]]) -> set[str]:
        """Return the keys that tell releases apart, from the newest event of the first device that has any."""
        flags = next((int(self.flags[end - 1]) for begin, end in traces if end > begin), None)
        return set() if flags is None else {"action", *(key for key, bit in _KEYS.items() if flags & bit)}

    def trace(self, interner: Interner, device: int, notes: list[str]) -> Trace:
        """Return these rows as a device's trace. Do what :func:`memprof.snapshot.columns.read_trace` does.

        Raises:
            ValueError: a size or address cannot be memory.
        """
        codes = np.array([action_code(name) for name in self.actions], np.uint8)
        action = codes[self.action]
        unknown = self.action[action == Action.UNKNOWN].tolist()
        note_unknown((self.actions[i] for i in unknown), device, notes)
        check_range(self.address, self.size)
        ends = int(self.flags[0]) | int(self.flags[-1])
        nothing = np.zeros(len(self), np.int32)
        return Trace(
            action=action,
            address=self.address,
            size=self.size,
            time_us=self._times() if ends & _HAS_TIME else np.arange(len(self), dtype=np.int64),
            stream=self.stream,
            pool=_interned(self.pool, self.pools, interner.pool) if ends & _HAS_POOL else nothing,
            stack=_interned(self.stack, self.stacks, interner.stack),
            metadata=_interned(self.metadata, self.texts, interner.text) if ends & _HAS_METADATA else nothing,
            has_times=bool(ends & _HAS_TIME),
        )

    def _times(self) -> I64:
        known = (self.flags & _KNOWS_TIME) != 0
        return self.time_us if known.all() else times_filled(self.time_us, known)


_COLUMNS = {
    **dict.fromkeys(("action", "flags"), np.uint8),
    **dict.fromkeys(("pool", "stack", "metadata"), np.int32),
    **dict.fromkeys(("address", "size", "stream", "time_us"), np.int64),
}


def _rows(found: dict[str, Any]) -> EventRows:
    columns: dict[str, Any] = {name: np.frombuffer(found.pop(name), kind) for name, kind in _COLUMNS.items()}
    return EventRows(**found, **columns)


def _interned(positions: I32, values: list[Any], intern: Any) -> I32:
    """Return the ids of values, which are interned in order of appearance; 0 for -1."""
    first = np.full(len(values) + 1, len(positions), np.int64)  # where each value appears first; the last stands for -1
    first[positions[::-1]] = np.arange(len(positions) - 1, -1, -1)
    ids = np.zeros(len(values) + 1, np.int32)
    for position in np.argsort(first[:-1], kind="stable").tolist():
        if first[position] < len(positions):
            ids[position] = intern(values[position])
    return ids[positions]
