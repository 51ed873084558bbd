"""Ask a recorder's counters for the peak of each phase alone, without the phases nested in it."""

from __future__ import annotations

from dataclasses import replace

from memprof.recording.phases import PhaseInterval
from memprof.recording.recorder import Recorder, WindowPeaks


class PhasePeaks:
    """Counts for the open phase that was entered last, as the report does; what lies between phases is like a phase
    around all."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # Between phases (None), then by open phase, in the order in which they were entered.
        self._own: dict[PhaseInterval | None, WindowPeaks | None] = {}
        self._since_last: WindowPeaks | None = None

    def begin(self) -> None:
        self._own = {None: None}
        self._recorder.open_window()

    def enter(self, mark: PhaseInterval) -> None:
        """Count for a phase from now on."""
        if self._own:
            self._turn()
        else:
            self.begin()
        self._own[mark] = None

    def leave(self, mark: PhaseInterval) -> WindowPeaks:
        """Return the peaks of a phase, and count for the one entered before it from now on."""
        now = self._turn()
        return self._own.pop(mark, None) or now

    def open(self) -> list[tuple[PhaseInterval | None, WindowPeaks]]:
        """Return the peaks so far of what is open: of what lies between phases (None), then of the phases."""
        now = self._turn()
        return [(mark, peaks or now) for mark, peaks in self._own.items()]

    def between(self) -> WindowPeaks:
        """Return the peaks of what lay between phases, and count that anew from now on."""
        now = self._turn()
        peaks, self._own[None] = self._own[None] or now, None
        return peaks

    def since_last(self) -> WindowPeaks:
        """Return the highest bytes since the last call, or since counting began."""
        now = self._turn()
        peaks, self._since_last = self._since_last or now, None
        return peaks

    def _turn(self) -> WindowPeaks:
        """Close the open window, add its peaks to the innermost phase, and open another."""
        seen = self._recorder.close_window()
        innermost = next(reversed(self._own))
        self._own[innermost] = _highest(self._own[innermost], seen)
        self._since_last = _highest(self._since_last, seen)
        self._recorder.open_window()
        return seen


def _highest(before: WindowPeaks | None, now: WindowPeaks) -> WindowPeaks:
    """Return the higher of each peak, and the sizes at the end of ``now``."""
    if before is None:
        return now
    return replace(
        now,
        allocated_peak=_higher(before.allocated_peak, now.allocated_peak),
        reserved_peak=_higher(before.reserved_peak, now.reserved_peak),
        active_peak=_higher(before.active_peak, now.active_peak),
        requested_peak=_higher(before.requested_peak, now.requested_peak),
    )


def _higher(*peaks: int | None) -> int | None:
    return max((peak for peak in peaks if peak is not None), default=None)
