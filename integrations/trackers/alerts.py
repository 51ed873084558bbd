"""Warn once when a run comes near the limit of its memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from memprof.errors import UsageError
from memprof.recording.guard import as_warning
from memprof.report.base import known
from memprof.report.counters import StepCounters
from memprof.units import format_bytes, parse_size

_PERCENT = re.compile(r"\s*(\d{1,3}(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True)
class HighMemory:
    """What ``on_high_memory`` is called with, once a training and rank.

    Attributes:
        rank: of the process.
        step: the optimizer step that ended.
        used_bytes: on a GPU, PyTorch's highest reserved memory since the line before, and non-PyTorch memory; without
            one, this process's resident memory.
        limit_bytes: what ``warn_above`` allows.
        capacity_bytes: of the device, or of the machine.
    """

    rank: int
    step: int
    used_bytes: int
    limit_bytes: int
    capacity_bytes: int


def parse_threshold(given: str | int | None) -> float | int | None:
    """Return a share of the capacity ("90%", as 0.9) or bytes ("20GB"); UsageError for neither."""
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given > 0):
        return given
    if isinstance(given, str) and (match := _PERCENT.fullmatch(given)) and 0 < float(match[1]) <= 100:
        return float(match[1]) / 100
    if isinstance(given, str) and "%" not in given:
        return parse_size(given)
    raise UsageError(f"warn_above={given!r} is no limit; use a share such as '90%' or a size such as '20GB'.")


class Alert:
    """Compare each counted step with the limit; warn, and call ``hook``, the first time that it is exceeded."""

    def __init__(
        self,
        threshold: float | int,
        capacity: int | None,
        rank: int,
        on_device: bool,
        hook: Callable[[HighMemory], object] | None,
    ) -> None:
        if isinstance(threshold, float) and capacity is None:
            raise UsageError("warn_above: the device's memory is not known, so a share of it is not; give a size.")
        self._capacity = int(capacity or threshold)
        self._limit = int(threshold * self._capacity) if isinstance(threshold, float) else threshold
        self._rank, self._on_device, self._hook = rank, on_device, hook
        self._over = False

    def look(self, row: StepCounters) -> None:
        """Compare a step's counters with the limit."""
        used = self._used(row)
        if self._over or used is None or used <= self._limit:
            return
        self._over = True
        found = HighMemory(self._rank, row.step, used, self._limit, self._capacity)
        as_warning(
            f"memprof: rank {self._rank} used {format_bytes(used)} of {format_bytes(self._capacity)} up to step "
            f"{found.step}, more than warn_above allows ({format_bytes(self._limit)}); training goes on."
        )
        if self._hook is None:
            return
        try:
            self._hook(found)
        except Exception as error:
            as_warning(f"memprof: on_high_memory raised {error!r}; training goes on.")

    def _used(self, row: StepCounters) -> int | None:
        if not self._on_device:
            return known(row.host_rss)
        reserved = known(row.peak_reserved) or known(row.reserved)
        return None if reserved is None else reserved + (known(row.non_torch) or 0)
