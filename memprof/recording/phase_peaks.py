"""Ask a recorder's counters for the peak of each phase alone, without the phases nested in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memprof.recording.recorder import Recorder, WindowPeaks


class PhasePeaks:
    """Counts for the innermost phase, as the report does; what lies between phases is like a phase around all."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._own: list[WindowPeaks | None] = []  # between phases, then by open phase, outermost first
        self._since_last: WindowPeaks | None = None

    def begin(self) -> None:
        self._own = [None]
        self._recorder.open_window()

    def enter(self) -> None:
        """Count for a nested phase from now on."""
        if self._own:
            self._turn()
        else:
            self.begin()
        self._own.append(None)

    def leave(self) -> WindowPeaks:
        """Return the peaks of the innermost phase, and count for the one around it from now on."""
        now = self._turn()
        return self._own.pop() or now

    def open(self) -> list[WindowPeaks]:
        """Return the peaks so far of what is open: what lies between phases, then the phases, outermost first."""
        now = self._turn()
        return [peaks or now for peaks in self._own]

    def between(self) -> WindowPeaks:
        """Return the peaks of what lay between phases, and count that anew from now on."""
        now = self._turn()
        peaks, self._own[0] = self._own[0] or now, None
        return peaks

    def since_last(self) -> WindowPeaks:
        """Return the highest bytes since the last call, or since counting began."""
        now = self._turn()
        peaks, self._since_last = self._since_last or now, None
        return peaks

    def _turn(self) -> WindowPeaks:
        """Close the open window, add its peaks to the innermost phase, and open another."""
        seen = self._recorder.close_window()
        self._own[-1] = _highest(self._own[-1], seen)
        self._since_last = _highest(self._since_last, seen)
        self._recorder.open_window()
        return seen


def _highest(before: WindowPeaks | None, now: WindowPeaks) -> WindowPeaks:
    """Return the higher of each peak, and the sizes at the end of ``now``."""
    if before is None:
        return now
    highest: dict[str, Any] = {}
    for name in ("allocated_peak", "reserved_peak", "active_peak", "requested_peak"):
        known = [peak for peak in (getattr(before, name), getattr(now, name)) if peak is not None]
        highest[name] = max(known, default=None)
    return replace(now, **highest)
