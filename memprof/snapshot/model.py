"""Define a memory snapshot as numpy columns, the form every later stage reads.

Each device has one :class:`Trace` (its events in order), one :class:`Segments` and one :class:`Blocks`
table (the allocator's state when the snapshot was taken). Stacks and metadata strings are kept once per
file. Nothing here changes after it was read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from memprof.snapshot.recorded_run import Annotation, RecordedDevice, RecordedRun
from memprof.snapshot.validation import Setting
from memprof.vocabulary import Kind

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]
_T = TypeVar("_T", bound=np.generic)
_ALL_BITS = (1 << 64) - 1
# Sorting the tied rows again costs less than sorting every row by each column while at most so small a part is tied.
_FEW_TIES = 8


def distinct(values: NDArray[_T]) -> NDArray[_T]:
    """Return the distinct values of a column, sorted: ``np.unique``, which asks numpy.ma and so imports it (20 ms)."""
    ordered = np.sort(values)
    first = np.ones(len(ordered), bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


def order_of(*keys: I64) -> I64:
    """Return the order of rows by columns, the last decides first: ``np.lexsort``, by plain sorts where they suffice.

    Where a column's value and a row's place fit one integer, sorting these is several times as fast as ``argsort``.
    Where the last column tells most rows apart, only the others are sorted by the columns before it.
    """
    order = _order(keys[-1])
    if len(keys) == 1:
        return order
    last = keys[-1][order]
    same = last[1:] == last[:-1]
    if np.count_nonzero(same) > len(order) // _FEW_TIES:
        order = _order(keys[0])
        for key in keys[1:]:
            order = order[_order(key[order])]
        return order
    tied = np.zeros(len(order), bool)
    tied[1:] |= same
    tied[:-1] |= same
    rows = order[tied]
    order[tied] = rows[np.lexsort([key[rows] for key in keys])]
    return order


def order_by_event(*keys: I64, n_events: int) -> I64:
    """Return :func:`order_of`, where the last column is an event from -1 to ``n_events``: mostly without a sort.

    In a real recording an event allocates or frees one block; only -1 and ``n_events`` stand for several rows.
    """
    event = keys[-1]
    rows = np.flatnonzero((event >= 0) & (event < n_events))
    row_of = np.full(n_events, -1, np.int64)
    row_of[event[rows]] = rows
    found = row_of[row_of >= 0]
    if len(found) != len(rows):
        return order_of(*keys)
    ends = [np.flatnonzero(event < 0), np.flatnonzero(event >= n_events)]
    first, last = (r[order_of(*(key[r] for key in keys[:-1]))] if len(keys) > 1 else r for r in ends)
    return np.concatenate([first, found, last])


def _order(key: I64) -> I64:
    if not len(key):
        return np.zeros(0, np.int64)
    if bool(np.all(key[1:] >= key[:-1])):
        return np.arange(len(key))
    low, bits = int(key.min()), len(key).bit_length()
    if (int(key.max()) - low).bit_length() + bits > 62:
        return np.argsort(key, kind="stable")
    places: I64 = np.sort(((key - low) << bits) + np.arange(len(key)))
    return places & ((1 << bits) - 1)


def is_among(values: I64, wanted: ArrayLike) -> NDArray[np.bool_]:
    """Tell of each value whether it is wanted: ``np.isin``, which sorts both where the wanted ones lie far apart."""
    known = np.sort(np.asarray(wanted, np.int64))
    if not len(known):
        return np.zeros(len(values), bool)
    found: NDArray[np.bool_] = known[np.minimum(np.searchsorted(known, values), len(known) - 1)] == values
    return found


def signed(addresses: Iterable[int]) -> I64:
    """Return unsigned addresses as a column, whose numbers are signed: the same 64 bits."""
    return np.fromiter((address & _ALL_BITS for address in addresses), np.uint64).view(np.int64)


def unsigned(address: int) -> int:
    """Return an address of a column as PyTorch writes it."""
    return int(address) & _ALL_BITS


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
    ANNOTATE = 9
    UNKNOWN = 10


class BlockState(IntEnum):
    """Codes of ``Blocks.state``."""

    ACTIVE = 0
    PENDING_FREE = 1
    INACTIVE = 2


class Frame(NamedTuple):
    """Hold one stack frame; it prints as ``file:line function``."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


@dataclass(frozen=True)
class StackTable:
    """Hold each distinct stack once. ``stacks[i]`` lists frame ids, innermost first; ``stacks[0]`` is empty."""

    frames: list[Frame]
    stacks: list[tuple[int, ...]]

    def of(self, stack: int) -> list[Frame]:
        """Return the frames of one stack, innermost first."""
        return [self.frames[f] for f in self.stacks[stack]]


@dataclass(frozen=True)
class Trace:
    """Hold the events of one device, oldest first; every column has one entry per event.

    ``size`` is in bytes as written in the file: requested or block bytes (see ``row_sizes``).
    ``time_us`` counts 0, 1, 2 ... where the file has no times (``has_times`` is then false).
    ``address`` of an ``OOM`` event holds the device's free bytes, or -1 where they are not known.
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
    """Hold the segments at the snapshot, by address. ``total`` is in bytes (the mapped ones when expandable)."""

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
    """Hold the blocks at the snapshot, by address. ``size`` and ``requested`` are in bytes.

    ``requested`` is 0 for inactive blocks. ``segment`` indexes :class:`Segments`.
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
    """Hold the content of one snapshot file.

    ``traces``, ``segments`` and ``blocks`` are by device index. ``pools`` are torch's ``(owner, id)`` pairs;
    ``pools[0] == (0, 0)`` is the default pool, and ``metadata[0] == ""``. ``settings`` are the allocator's. ``run`` is
    the ``"memprof"`` key, with the defaults of its fields for a file that memprof did not write. ``notes`` tell the
    reader what was dropped or could not be read.
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
    settings: dict[str, Setting]
    annotations: list[Annotation]
    run: RecordedRun = field(default_factory=RecordedRun)
    notes: list[str] = field(default_factory=list)

    def device_facts(self, device: int) -> RecordedDevice:
        """Return what was recorded about a device; every field is ``None`` if nothing was."""
        recorded = [*self.run.devices, self.run.device or RecordedDevice()]
        return next((facts for facts in recorded if facts.index in (device, None)), RecordedDevice())

    def recorder_asked_about(self, device: int) -> bool:
        """Tell whether the recorder's driver figures and counters are about this device: they cover only one."""
        return self.run.device is None or self.run.device.index in (device, None)

    def survived(self, failed_us: int) -> bool:
        """Tell whether the run caught the error of an allocation that failed then, and went on."""
        return any(failed_us <= failure.went_on_us for failure in self.run.survived)

    @property
    def run_without_sources(self) -> RecordedRun:
        """Return the run without the text of the program's files: what redacting has to know."""
        return msgspec.structs.replace(self.run, sources=())

    def with_run(self, **changes: object) -> Snapshot:
        """Return this snapshot with other values in fields of its run."""
        return replace(self, run=msgspec.structs.replace(self.run, **changes))

    @property
    def devices(self) -> list[int]:
        """Return the devices that have at least one event or segment, in ascending order."""
        return sorted(
            d
            for d in self.segments.keys() | self.traces.keys()
            if len(self.segments.get(d, ())) or len(self.traces.get(d, ()))
        )
