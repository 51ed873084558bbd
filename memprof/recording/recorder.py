"""Define what a recorder is: the one interface behind which CUDA's history and the tensor trace stand."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

from memprof.recording.frames import Stack
from memprof.recording.guard import FailureGuard
from memprof.vocabulary import History, Kind


class TraceEntry(TypedDict, total=False):
    """An event of a device's trace, as torch writes it; sizes in bytes."""

    action: str
    addr: int
    size: int
    stream: int
    time_us: int
    compile_context: str
    user_metadata: str
    frames: Stack


Trace = list[TraceEntry]


class BlockRecord(TypedDict, total=False):
    """A block of a segment, as torch writes it; torch before 2.1 leaves the address out."""

    address: int
    size: int
    requested_size: int
    state: str
    frames: Stack


class Segment(TypedDict, total=False):
    """A segment of the allocator, as torch writes it."""

    device: int
    address: int
    total_size: int
    allocated_size: int
    active_size: int
    requested_size: int
    stream: int
    segment_type: str
    segment_pool_id: tuple[int, int]
    is_expandable: bool
    frames: Stack
    blocks: list[BlockRecord]


class RawSnapshot(TypedDict, total=False):
    """What ``torch.cuda.memory._snapshot()`` returns: segments, a trace for each device, and settings."""

    segments: list[Segment]
    device_traces: list[Trace]
    allocator_settings: Mapping[str, object]
    external_annotations: list[Any]


@dataclass(frozen=True)
class AllocationTags:
    """Hold the tags of every allocation from now on."""

    phase: str = "other"
    step: int | None = None
    role: str | None = None


@dataclass(frozen=True)
class RunIdentity:
    """What the files of one run have in common: a random ``id``, and when the run ``started``, in Unix seconds.

    ``id`` is None if nobody knows what else belongs to the run: for a ``record`` block, and for processes that could
    not agree on one.
    """

    id: str | None
    started: float

    @classmethod
    def new(cls) -> RunIdentity:
        """Return the identity of a run that starts now."""
        return cls(secrets.token_hex(8), round(time.time(), 3))


@dataclass(frozen=True)
class DeviceInfo:
    """The device that is watched; ``total_bytes`` is None where it is not a property of the device."""

    index: int
    type: str
    name: str
    total_bytes: int | None


@dataclass(frozen=True)
class WindowPeaks:
    """Hold the highest bytes between two instants; None where the recorder cannot know."""

    allocated_peak: int | None
    reserved_peak: int | None
    active_peak: int | None
    requested_peak: int | None
    allocated_end: int
    reserved_end: int | None


@dataclass(frozen=True)
class PhaseCount:
    """Hold the allocator's highest bytes of a phase, without those nested in it."""

    phase: str
    step: int | None
    start_us: int
    end_us: int
    peaks: WindowPeaks

    def to_plain(self) -> dict[str, int | str | None]:
        """Return a row of the snapshot's ``counters``."""
        own = {"phase": self.phase, "step": self.step, "start_us": self.start_us, "end_us": self.end_us}
        return {**own, **vars(self.peaks)}


@dataclass(frozen=True)
class FailedRequest:
    """An allocation that failed.

    Attributes:
        requested_bytes: size of the request.
        device_free_bytes: what the driver had free, if known.
        stack: of the request, innermost frame first, a line each.
        time_us: when it failed.
        device: index of the device; None if there is only one.
        limit_bytes: what the process may reserve; None if that is the whole device.
    """

    requested_bytes: int
    device_free_bytes: int | None
    stack: list[str]
    time_us: int
    device: int | None = None
    limit_bytes: int | None = None

    def to_plain(self) -> dict[str, int | list[str] | None]:
        """Return the snapshot's ``oom``; ``limit_bytes`` is known where the device is."""
        left_out = ("device", "limit_bytes") if self.device is None else ()
        return {name: value for name, value in vars(self).items() if name not in left_out}


@dataclass(frozen=True)
class DeviceHistory:
    """How much of a device's history a dump holds: from ``start_us`` on, and how complete that is."""

    index: int
    start_us: int
    history: History


@dataclass(frozen=True)
class Recorded:
    """State how much of the history a dump holds: of the recorder's own device, and of ``others``."""

    start_us: int
    stop_us: int
    history: str
    dropped_events: int
    max_entries: int | None
    thinned: list[list[int]]
    others: Sequence[DeviceHistory] = ()

    @property
    def earliest_us(self) -> int:
        """When the history of any device begins."""
        return min([self.start_us, *(one.start_us for one in self.others)])

    def to_plain(self) -> dict[str, object]:
        """Return the ``recorded`` part of the snapshot's ``"memprof"`` key."""
        names = ("start_us", "stop_us", "history", "dropped_events", "max_entries", "thinned")
        return {name: getattr(self, name) for name in names}


class Recorder(Protocol):
    """Record allocations and frees on one device; dump them in torch's snapshot format, at any time from ``start`` on.

    Windows nest like the phases they belong to.
    """

    kind: Kind
    notes: list[str]
    bounded: bool  # whether old entries may be lost
    guard: FailureGuard  # between the run and what this hooks into

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def now_us(self) -> int:
        """Return a time on the clock of the trace's events."""
        ...

    def set_tags(self, tags: AllocationTags) -> None: ...

    def open_window(self) -> None: ...

    def close_window(self) -> WindowPeaks: ...

    def dump(self) -> tuple[RawSnapshot, Recorded]:
        """Return the snapshot without the ``"memprof"`` key, and how complete it is."""
        ...

    def device(self) -> DeviceInfo: ...

    def watches(self, device_type: str) -> bool:
        """Tell whether the trace records storages on devices of this type."""
        ...

    def oom(self) -> FailedRequest | None:
        """Return the last failed allocation, None where none failed or it was forgotten."""
        ...

    def forget_oom(self) -> None:
        """Forget the failed allocation: the program caught the error and continues."""
        ...
