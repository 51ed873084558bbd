"""A memory snapshot as columns: what every reader produces and everything else consumes.

One :class:`Trace` (events in order), one :class:`Segments` and one :class:`Blocks` table (the
allocator's state when the snapshot was taken) per device. Stacks and metadata strings are interned
once per file. Nothing here is ever changed after it was read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memprof.vocabulary import Kind

__all__ = ["Action", "BlockState", "Blocks", "Frame", "Segments", "Snapshot", "StackTable", "Trace"]

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]


class Action(IntEnum):
    """Codes of ``Trace.action``; the names are torch's, lower-cased."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6
    OOM = 7
    SNAPSHOT = 8
    UNKNOWN = 9


class BlockState(IntEnum):
    """Codes of ``Blocks.state``."""

    ACTIVE = 0
    PENDING_FREE = 1
    INACTIVE = 2


class Frame(NamedTuple):
    """One stack frame."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


@dataclass(frozen=True)
class StackTable:
    """Interned stacks. ``stacks[i]`` holds frame ids, innermost first; ``stacks[0]`` is empty."""

    frames: list[Frame]
    stacks: list[tuple[int, ...]]

    def of(self, stack: int) -> list[Frame]:
        """The frames of one stack, innermost first."""
        return [self.frames[f] for f in self.stacks[stack]]


@dataclass(frozen=True)
class Trace:
    """Events of one device, oldest first; all columns have one entry an event.

    ``size`` is in bytes as written in the file (requested or block size, see ``Timeline``);
    ``time_us`` counts 0, 1, 2 ... where the file has no times (``has_times`` false);
    ``address`` of an ``OOM`` event holds the device's free bytes.
    """

    action: U8
    address: I64
    size: I64
    time_us: I64
    stream: I64
    pool: I32
    stack: I32
    metadata: I32
    has_times: bool

    def __len__(self) -> int:
        return len(self.action)


@dataclass(frozen=True)
class Segments:
    """Segments at the snapshot, by address. ``total`` in bytes (mapped bytes when expandable)."""

    address: I64
    total: I64
    stream: I64
    pool: I32
    stack: I32
    large: NDArray[np.bool_]
    expandable: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True)
class Blocks:
    """Blocks at the snapshot, by address. ``size`` is the block, ``requested`` what was asked for.

    ``requested`` is 0 for inactive blocks; ``segment`` indexes :class:`Segments`.
    """

    address: I64
    size: I64
    requested: I64
    state: U8
    segment: I32
    stack: I32

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True)
class Snapshot:
    """One file, read.

    ``pools`` are torch's ``(owner, id)`` pairs, ``pools[0] == (0, 0)`` is the default pool;
    ``metadata[0] == ""``. ``extra`` is the ``"memprof"`` key (see ``docs/snapshot-format.md``),
    empty for a foreign file. ``notes`` say what could not be known.
    """

    path: str | None
    kind: Kind
    torch: str
    traces: dict[int, Trace]
    segments: dict[int, Segments]
    blocks: dict[int, Blocks]
    stacks: StackTable
    pools: list[tuple[int, int]]
    metadata: list[str]
    settings: dict[str, Any]
    annotations: list[dict[str, Any]]
    extra: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def devices(self) -> list[int]:
        """Devices that have at least one event or segment."""
        return sorted(
            d
            for d in self.segments.keys() | self.traces.keys()
            if len(self.segments.get(d, ())) or len(self.traces.get(d, ()))
        )
