"""Define what a recorder is: the one interface behind which CUDA's history and the tensor trace stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from memprof.recording.guard import Door
from memprof.vocabulary import History, Kind


@dataclass(frozen=True)
class Tags:
    """Hold the tags of every allocation from now on."""

    phase: str = "other"
    step: int | None = None
    role: str | None = None


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

    def to_plain(self) -> dict[str, Any]:
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
    door: Door  # between the run and what this hooks into

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def now_us(self) -> int:
        """Return a time on the clock of the trace's events."""
        ...

    def set_tags(self, tags: Tags) -> None: ...

    def open_window(self) -> None: ...

    def close_window(self) -> WindowPeaks: ...

    def dump(self) -> tuple[dict[str, Any], Recorded]:
        """Return the snapshot dict without the ``"memprof"`` key, and how complete it is."""
        ...

    def device(self) -> DeviceInfo: ...

    def watches(self, device_type: str) -> bool:
        """Tell whether the trace records storages on devices of this type."""
        ...

    def oom(self) -> dict[str, Any] | None:
        """Return the last failed allocation (``requested_bytes``, ``device_free_bytes``, ``stack``, ``time_us``; on
        CUDA also ``device`` and ``limit_bytes``, what the process may reserve), None where none failed or it was
        forgotten."""
        ...

    def forget_oom(self) -> None:
        """Forget the failed allocation: the program caught the error and continues."""
        ...
