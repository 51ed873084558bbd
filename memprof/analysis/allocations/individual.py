"""Choose the allocations worth following one by one over a run; the others are summed by category."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.analysis.allocations.alike import Described, TimedGroup, describe_group, groups_of
from memprof.snapshot.model import I64, U8, distinct


@dataclass(frozen=True)
class IndividualAllocations:
    """Hold the largest allocations by bytes times lifetime, in order of birth.

    A row is alive at instant ``k`` when ``begin < k <= end``; ``begin`` is -1 for those older than the recording.

    Attributes:
        groups: descriptions; alike allocations share one.
        group: the index in ``groups`` of each row.
        begin: the event that allocated each; ``end``: the event that freed it, the number of events if none did.
        born_us: when each was allocated; ``died_us``: when it was freed. Both are -1 if the recording does not show
            it; without times they count events.
        address: of each block; ``size``: its bytes.
        freed_in: the code of the phase that freed each; 255 for those that none did.
        count: the number of all allocations of the recording.
    """

    groups: tuple[TimedGroup, ...]
    group: I64
    begin: I64
    end: I64
    born_us: I64
    died_us: I64
    address: I64
    size: I64
    freed_in: U8
    count: int


def individual_allocations(views: Described, forced: I64, most: int, most_groups: int) -> IndividualAllocations:
    """Choose ``most`` allocations of at most ``most_groups`` kinds, those of ``forced`` first."""
    line = views.timeline
    weight = line.size.astype(np.float64) * np.maximum(line.free_event - np.maximum(line.alloc_event, 0), 1)
    weight[forced] *= 1e6
    chosen = np.argpartition(-weight, most)[:most] if len(line) > most else np.arange(len(line))
    groups = groups_of(views, np.sort(chosen).astype(np.int64))
    groups = sorted(groups, key=lambda rows: -float(weight[rows].sum()))[:most_groups]
    rows = np.concatenate(groups) if groups else np.zeros(0, np.int64)
    group = np.repeat(np.arange(len(groups)), [len(g) for g in groups])
    order = np.argsort(rows, kind="stable")
    rows, group = rows[order], group[order]
    phases = views.attribution.track.phase
    end, n_events = line.free_event[rows], line.n_events
    freed_in = np.full(len(rows), 255, np.uint8)
    if len(phases):
        freed_in[end < n_events] = phases[end[end < n_events]]
    return IndividualAllocations(
        groups=tuple(describe_group(views, g, int(line.size[g].sum())) for g in groups),
        group=group,
        begin=line.alloc_event[rows],
        end=end,
        born_us=np.where(line.alloc_event[rows] >= 0, line.born_us[rows], -1),
        died_us=line.died_us[rows],
        address=line.address[rows],
        size=line.size[rows],
        freed_in=freed_in,
        count=len(line),
    )


def largest_rows(size: I64, sets: list[I64], each: int) -> I64:
    """Return the ``each`` largest of every set of rows, without repetition."""
    return distinct(np.concatenate([rows[np.argsort(-size[rows], kind="stable")[:each]] for rows in sets]))
