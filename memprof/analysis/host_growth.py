"""Tell from the counters of a run whether host memory grows from step to step, and which part of it does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from memprof.errors import InputError
from memprof.report.base import known
from memprof.report.run import Host, HostGrowth
from memprof.snapshot.recorded_run import HostMemory
from memprof.units import GIB

if TYPE_CHECKING:
    from memprof.report.counters import StepCounters

#: The parts of host memory, and their words. Arenas are part of private memory, pinned memory of none of the others.
PARTS = {
    "host_children": "child processes (dataloader workers)",
    "host_shared": "shared memory (/dev/shm: Ray's object store, tensors of workers)",
    "host_files": "mapped files (datasets, checkpoints)",
    "host_pinned": "torch's cache of pinned memory",
    "host_arenas": "freed memory that malloc's arenas keep (MALLOC_ARENA_MAX=2, malloc_trim)",
    "host_anon": "private memory in use (Python objects, CPU tensors)",
}
# The first steps build caches and import code; what they add is no growth from step to step.
_WARM_UP, _LEAST_STEPS = 3, 8
_LEAST_BYTES, _LEAST_SHARE = GIB // 4, 0.05
# Memory must have grown in so many of the run's four quarters.
_RISING = 3


def host_growth(rows: Sequence[StepCounters]) -> HostGrowth | None:
    """Return the growth of a run's host memory after its warm-up; None where it does not grow, or too little is known.

    Args:
        rows: the steps of one rank, as :class:`memprof.analysis.counters.Counters` has them.
    """
    rows = [row for row in rows if row.size("host_rss") is not None][_WARM_UP:]
    if len(rows) < _LEAST_STEPS:
        return None
    levels = [(row.size("host_rss") or 0) + (row.size("host_children") or 0) for row in rows]
    grown = levels[-1] - levels[0]
    if grown < max(_LEAST_BYTES, _LEAST_SHARE * levels[0]) or not _rises(levels):
        return None
    parts = {name: (rows[-1].size(name) or 0) - (rows[0].size(name) or 0) for name in PARTS}
    parts["host_anon"] -= parts["host_arenas"]  # which are in it
    ordered = {name: size for name, size in sorted(parts.items(), key=lambda part: -part[1]) if size > 0}
    steps = max(1, rows[-1].step - rows[0].step)
    named = [f"{PARTS[name]} {size / GIB:.2f} GiB" for name, size in ordered.items() if size > 0.1 * grown]
    said = "; ".join(named) if named else "no part that is told apart accounts for it"
    how = f"{grown / steps / GIB:.3f} GiB a step, {grown / GIB:.2f} GiB in {steps} steps"
    return HostGrowth(
        steps=steps,
        bytes=grown,
        parts={name.removeprefix("host_"): size for name, size in ordered.items()},
        sentence=f"Host memory grows by {how}: {said}.",
    )


def host_report(host: HostMemory | None, snapshot: str | None, rank: int) -> tuple[Host | None, str | None]:
    """Return a report's ``host``, with ``growth`` from the counters that the run keeps beside its snapshots; and a
    note: how it grew, or why that is not known.

    Args:
        host: what the snapshot holds; None for somebody else's, whose neighbours are not read.
        snapshot: its path, if it was read from a file.
    """
    if host is None:
        return None, None
    recorded = Host(
        pinned_bytes=known(host.pinned_bytes),
        pinned_requested_bytes=known(host.pinned_requested_bytes),
        managed_bytes=known(host.managed_bytes),
        rss_bytes=known(host.rss_bytes),
        offloaded=host.offloaded,
    )
    if snapshot is None:
        return recorded, None
    counters = counters_beside(Path(snapshot), rank)
    if not counters.is_file():
        return recorded, None
    from memprof.analysis.counters import read_counters

    try:
        found = host_growth(read_counters(counters).steps)
    except InputError as error:
        why = str(error).replace(str(counters), counters.name)
        return recorded, f"Whether host memory grew from step to step is not known: {why}"
    return (recorded, None) if found is None else (replace(recorded, growth=found), found.sentence)


def counters_beside(snapshot: Path, rank: int) -> Path:
    """Return where a run keeps the counters of the rank whose snapshot this is."""
    return snapshot.parent / f"counters.rank-{rank}.jsonl"


def _rises(levels: Sequence[int]) -> bool:
    """Say whether memory rose in most quarters of the run, not once."""
    marks = [levels[round(i * (len(levels) - 1) / 4)] for i in range(5)]
    return sum(b > a for a, b in pairwise(marks)) >= _RISING
