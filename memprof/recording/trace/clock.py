"""One clock for events, phase marks and owner claims.

Unix microseconds, as in torch's own traces; never goes back and never gives the same value twice, so that
"what was alive at this time" has one answer.
"""

from __future__ import annotations

import time


class Clock:
    """Strictly increasing Unix microseconds, by ``perf_counter_ns`` and one reading of the wall clock: adjusting the
    system's time while a run is recorded cannot reorder its events."""

    __slots__ = ("_base", "_last")

    def __init__(self) -> None:
        self._base = time.time_ns() - time.perf_counter_ns()
        self._last = 0

    def tick(self) -> int:
        """Return the time in microseconds, later than every earlier call's."""
        now = (self._base + time.perf_counter_ns()) // 1000
        if now <= self._last:
            now = self._last + 1
        self._last = now
        return now
