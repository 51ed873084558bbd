"""Decide which steps outside a recording are written because their memory peak is a new record."""

from __future__ import annotations

import time
from collections.abc import Callable

from memprof.units import format_gib

# By how much the first must top every written step; each later one must by twice as much as the one before.
_GROWTH = 0.02
# How many a `train()` writes. With the growth they must show, this many cover a run whose memory grows twentyfold.
_MOST = 8
# The share of a run's time that writing them may take, and the least seconds between two.
_SHARE = 0.05
_SECONDS = 60.0


class NewRecords:
    """Hold the highest peak that is written, and decide whether a step's is to be.

    A run whose memory grows from step to step would otherwise write its whole ring at each of them, while the other
    ranks wait. Three bounds hold: the growth doubles with every record, there are at most eight, and writing takes no
    more than a twentieth of the time. Not ``wanted``: the steps to record are chosen, and higher peaks are reported.
    """

    def __init__(self, wanted: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._wanted, self._clock = wanted, clock
        self._written = 0  # the highest peak that is in a recording, or the first step's
        self._count = 0
        self._not_before = clock()
        self._missed: tuple[int, int] | None = None  # peak and step of the highest that was not written
        self._why = ""

    def recorded(self, peak: int) -> None:
        """Note the peak of a step that is recorded anyway, or of the first one, which all others are compared with."""
        self._written = max(self._written, peak)

    def is_one(self, step: int, peak: int) -> bool:
        """Tell whether to write this step, which nothing else records; remember it where a bound forbids it."""
        if not self._written or peak <= self._written * (1 + _GROWTH):
            if not self._written:
                self.recorded(peak)
            return False
        why = self._forbidden(peak)
        if why:
            if self._missed is None or peak > self._missed[0]:
                self._missed, self._why = (peak, step), why
            return False
        self._count += 1
        self.recorded(peak)
        return True

    def took(self, seconds: float) -> None:
        """Record how long writing one took, its report included."""
        self._not_before = self._clock() + max(_SECONDS, seconds * (1 / _SHARE - 1))

    def _forbidden(self, peak: int) -> str:
        if not self._wanted:
            return "the steps to record were chosen"
        if self._count >= _MOST:
            return f"{_MOST} such steps were written already"
        if self._clock() < self._not_before:
            return "the last recording had been written only just before"
        growth = _GROWTH * 2**self._count
        if peak <= self._written * (1 + growth):
            return f"it is less than {growth:.0%} above the highest that is written"
        return ""

    def notes(self) -> list[str]:
        """Say which higher peak is in no recording, and why."""
        if self._missed is None or self._missed[0] <= self._written * (1 + _GROWTH):
            return []
        peak, step = self._missed
        return [
            f"Step {step} had a higher peak, {format_gib(peak)} GiB, than any step in a recording "
            f"or the first one ({format_gib(self._written)} GiB). It was not written, because {self._why}. "
            f"MemProfCallback(steps=[{step}]) records it."
        ]
