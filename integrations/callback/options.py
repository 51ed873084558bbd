"""Check what a user asks of the callback."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memprof.integrations.trackers.alerts import HighMemory, parse_threshold

from memprof.errors import UsageError
from memprof.recording.api import capacity_bytes
from memprof.units import parse_size


@dataclass(frozen=True)
class Options:
    """Validated options; see :class:`memprof.MemProfCallback` for what each means."""

    output_dir: Path | None = None
    steps: Iterable[int] | None = None
    every: int | None = None
    max_entries: int | None = None
    stacks: str | None = "python"
    report: bool = True
    max_disk: int | None = None
    redact: bool = False
    kind: str = "auto"
    reset_peaks: bool = True
    scalars: bool = True
    capacity: int | None = None
    rehearse: bool = False
    warn_above: float | int | None = None  # a share of the capacity, or bytes
    on_high_memory: Callable[[HighMemory], object] | None = None

    @classmethod
    def of(
        cls,
        max_disk: int | str | None = None,
        output_dir: Any = None,
        max_entries: int | None = None,
        stacks: str | None = "python",
        capacity: int | str | None = None,
        warn_above: int | str | None = None,
        **rest: Any,
    ) -> Options:
        """Check what can be checked before anything runs; UsageError for an option that cannot be satisfied."""
        if stacks not in ("python", "all", None):
            raise UsageError(f"stacks={stacks!r} is not known; use 'python', 'all' or None.")
        if max_entries is not None and max_entries < 1:
            raise UsageError("max_entries is the maximum number of entries: at least 1, or None for no limit.")
        room = None if capacity is None else capacity_bytes(capacity)
        disk = parse_size(max_disk) if isinstance(max_disk, str) else max_disk
        folder = None if output_dir is None else Path(output_dir)
        if warn_above is not None and not rest.get("scalars", True):
            raise UsageError("warn_above= reads the counters of each step: leave scalars=True.")
        limit = parse_threshold(warn_above)
        if limit is None and rest.get("on_high_memory") is not None:
            raise UsageError("on_high_memory= is called when memory exceeds warn_above=; give that too.")
        return cls(
            max_disk=disk, output_dir=folder, max_entries=max_entries, stacks=stacks, capacity=room, warn_above=limit,
            **rest,
        )  # fmt: skip
