"""Fold allocations that are alike into one: equal in size, purpose, evidence, phase, stack, and name but for digits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from msgspec.structs import asdict

from memprof.attribution.result import Attribution
from memprof.report.allocations import Allocation, AllocationGroup
from memprof.snapshot import Snapshot
from memprof.snapshot.model import I64, distinct
from memprof.timeline.timeline import Timeline

#: When an allocation was made and freed, in microseconds; None: before recording began, and not freed.
Life = tuple[int | None, int | None]


class TimedGroup(AllocationGroup, frozen=True, kw_only=True):
    """A group of alike allocations with the times of each.

    Attributes:
        lives: when each was made and freed.
    """

    lives: tuple[Life, ...]


class Described(Protocol):
    """An attributed device that can describe its rows, as :class:`memprof.analysis.views.Views` does."""

    snapshot: Snapshot
    timeline: Timeline
    attribution: Attribution

    @property
    def holders(self) -> Mapping[int, Sequence[str]]:
        """Return by row what held the block when the recording ended."""

    def allocation(self, row: int) -> Allocation:
        """Return all that is known of one row."""


def largest_groups(views: Described, rows: I64, top: int | None = None) -> list[TimedGroup]:
    """Describe the groups among ``rows`` that hold most together, the largest sum first."""
    groups = groups_of(views, rows)
    sums = [int(views.timeline.size[group].sum()) for group in groups]
    order = sorted(range(len(groups)), key=lambda i: (-sums[i], int(groups[i][0])))
    return [describe_group(views, groups[i], sums[i]) for i in order[:top]]


def groups_of(views: Described, rows: I64) -> list[I64]:
    """Split ``rows`` into groups of alike allocations; every row is in exactly one."""
    if not len(rows):
        return []
    line, found = views.timeline, views.attribution
    names = _patterns(found.name[rows], found.names, _name_pattern)
    shapes = _patterns(line.metadata[rows], views.snapshot.metadata, tag_shape)
    columns = (
        line.size, found.category, found.detail, found.evidence, found.rule, found.phase, found.retained,
        line.stack, found.alternatives,
    )  # fmt: skip
    keys = np.stack([*(np.asarray(column[rows], dtype=np.int64) for column in columns), names, shapes])
    _, kind = np.unique(keys, axis=1, return_inverse=True)
    kind = kind.reshape(-1)
    order = np.argsort(kind, kind="stable")
    edges = np.flatnonzero(np.diff(kind[order])) + 1
    return np.split(rows[order], edges)


def _patterns(ids: Any, words: Sequence[Any], pattern: Callable[[Any], str]) -> I64:
    """Number the patterns of the words that ``ids`` name: ids of words with one pattern get one number."""
    used, where = np.unique(np.asarray(ids, dtype=np.int64), return_inverse=True)
    numbers: dict[str, int] = {}
    of = [numbers.setdefault(pattern(words[int(i)]), len(numbers)) for i in used]
    return np.array(of, dtype=np.int64)[where.reshape(-1)]


def describe_group(views: Described, group: I64, total: int) -> TimedGroup:
    """Describe rows that are alike, ``total`` bytes together."""
    line, found = views.timeline, views.attribution
    names = [found.names[int(i)] or "" for i in distinct(found.name[group])]
    born = np.where(line.alloc_event[group] >= 0, line.born_us[group], -1)
    lives = [
        (None if b < 0 else b, None if d < 0 else d)
        for b, d in zip(born.tolist(), line.died_us[group].tolist(), strict=True)
    ]
    held = [who for row in group.tolist() for who in views.holders.get(row, [])] if views.holders else []
    first, requested = views.allocation(int(group[0])), int(line.requested[group].sum())
    return _group(first, lives, total, requested, common_name(names), held)


def fold(listed: Iterable[Allocation]) -> list[TimedGroup]:
    """Fold allocations described one by one, as a report lists them, into groups as :func:`largest_groups` returns."""
    alike: dict[_Likeness, list[Allocation]] = {}
    for allocation in listed:
        alike.setdefault(_likeness(allocation), []).append(allocation)
    return sorted((_folded(group) for group in alike.values()), key=lambda group: -group.bytes)


def without_lives(group: TimedGroup) -> AllocationGroup:
    """Return a group as a report lists it."""
    return AllocationGroup(**{name: getattr(group, name) for name in AllocationGroup.__struct_fields__})


#: What alike allocations share.
_Likeness = tuple[object, ...]


def _likeness(a: Allocation) -> _Likeness:
    name = _name_pattern(a.name) + tag_shape(a.tag)
    return a.bytes, a.category, a.detail, a.evidence, a.rule, a.phase, a.retained, name, a.stack, a.alternatives


def _folded(group: Sequence[Allocation]) -> TimedGroup:
    held = [who for a in group for who in a.held_by]
    sums = sum(a.bytes for a in group), sum(a.requested_bytes for a in group)
    return _group(
        group[0], [(a.born_us, a.died_us) for a in group], *sums, common_name([a.name or "" for a in group]), held
    )


def _group(
    first: Allocation, lives: Sequence[Life], total: int, requested: int, name: str, held: Iterable[str]
) -> TimedGroup:
    own = {
        "count": len(lives),
        "bytes": total,
        "each_bytes": first.bytes,
        "requested_bytes": requested,
        "name": name or None,
        "held_by": tuple(dict.fromkeys(held)),
        "born_us": _outermost(min, [born for born, _ in lives]),
        "died_us": _outermost(max, [died for _, died in lives]),
        "lives": tuple(lives),
    }
    return TimedGroup(**{**asdict(first), **own})


def _outermost(pick: Callable[[list[int]], int], times: Sequence[int | None]) -> int | None:
    """Pick the outermost time; None, which is beyond the recording, where one of them is."""
    within = [t for t in times if t is not None]
    return pick(within) if len(within) == len(times) else None


def _name_pattern(name: object) -> str:
    return re.sub(r"\d+", "#", str(name or ""))


def common_name(names: Sequence[str]) -> str:
    """Write ``layers.0.w`` and ``layers.1.w`` as ``layers.*.w``: the digits that differ become a star."""
    parts = [re.split(r"(\d+)", name) for name in names]
    if any(len(p) != len(parts[0]) for p in parts):
        return names[0]
    return "".join(column[0] if len(set(column)) == 1 else "*" for column in zip(*parts, strict=True))


def tag_shape(tag: object) -> str:
    """Read ``8×128×576 bfloat16`` from a recorder's own tag; empty for no tag or somebody else's."""
    if not isinstance(tag, str) or not tag.startswith("memprof:"):
        return ""
    fields = dict(field.partition("=")[::2] for field in tag.removeprefix("memprof:").split(";"))
    return f"{fields.get('shape', '').replace('x', '×')} {fields.get('dtype', '')}".strip()
