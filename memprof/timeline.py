"""Allocation lifetimes of one device, rebuilt from its trace and its final state.

Instants: ``k`` is the state after the first ``k`` events, ``0 <= k <= n_events``. A row is alive at
``k`` when ``alloc_event < k <= free_event``. Blocks that were there before the first event
("ghosts") have ``alloc_event == -1``; what is still alive at the end has ``free_event == n_events``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memprof.snapshot.model import I32, I64, Action, BlockState, Snapshot, Trace

__all__ = ["Timeline", "build_timeline"]


@dataclass(frozen=True)
class Timeline:
    """One row per allocation lifetime, and the running totals.

    Row columns: ``address``; ``size`` (block bytes, what the device holds); ``requested`` bytes;
    ``alloc_event``, ``release_event`` (free_requested) and ``free_event`` (free_completed), see the
    module's convention for instants; ``born_us``/``died_us`` (``died_us`` is -1 while alive);
    ``stream``, ``pool``, ``stack`` and ``metadata`` index the snapshot's tables.

    Totals have ``n_events + 1`` entries, one an instant: ``active`` = bytes whose free has not
    completed, ``allocated`` = bytes the program holds, ``requested_total`` = live requested bytes,
    ``reserved`` = bytes of segments (None for a tensor trace).
    """

    device: int
    n_events: int
    event_us: I64
    address: I64
    size: I64
    requested: I64
    alloc_event: I64
    release_event: I64
    free_event: I64
    born_us: I64
    died_us: I64
    stream: I64
    pool: I32
    stack: I32
    metadata: I32
    active: I64
    allocated: I64
    requested_total: I64
    reserved: I64 | None
    oom_events: I64
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.address)

    def alive_at(self, instant: int) -> NDArray[np.int64]:
        """Rows alive (active) at ``instant``, in order of birth."""
        return np.flatnonzero((self.alloc_event < instant) & (instant <= self.free_event))

    def time_us(self, instant: int) -> int:
        """When ``instant`` began: the time of the event that led to it (0 without events)."""
        if not self.n_events:
            return 0
        return int(self.event_us[max(instant - 1, 0)])

    def instant_at(self, time_us: int) -> int:
        """The state at ``time_us``: after every event up to and including that time."""
        return int(np.searchsorted(self.event_us, time_us, side="right"))

    @property
    def peak_instant(self) -> int:
        """First instant of the highest ``allocated``."""
        return int(np.argmax(self.allocated))

    @property
    def max_requested(self) -> int:
        """The highest sum of live requested bytes."""
        return int(self.requested_total.max())


def build_timeline(snapshot: Snapshot, device: int | None = None) -> Timeline:
    """Lifetimes on ``device`` (default: the one with the highest peak of requested bytes)."""
    if device is None:
        lines = [build_timeline(snapshot, d) for d in snapshot.devices]
        return max(lines, key=lambda t: t.max_requested)
    ...
