"""Fold allocations that are alike into one: equal in size, purpose, evidence, phase, stack, and name but for digits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from memprof.attribution.result import Attribution
from memprof.snapshot import Snapshot
from memprof.snapshot.model import I64, distinct
from memprof.timeline.timeline import Timeline

# What alike allocations share, beside the pattern of their names and the shape in their tags.
_SHARED = ("bytes", "category", "detail", "evidence", "rule", "phase", "retained")


class Described(Protocol):
    """An attributed device that can describe its rows, as :class:`memprof.analysis.views.Views` does."""

    snapshot: Snapshot
    timeline: Timeline
    attribution: Attribution

    @property
    def holders(self) -> Mapping[int, Sequence[str]]:
        """Return by row what held the block when the recording ended."""

    def allocation(self, row: int) -> dict[str, Any]:
        """Return all that is known of one row."""


def largest_groups(views: Described, rows: I64, top: int | None = None) -> list[dict[str, Any]]:
    """Describe the groups among ``rows`` that hold most together, the largest sum first.

    Each is the first block's description (``Views.allocation``) with the ``count`` of blocks, the sum of their
    ``bytes`` and ``requested_bytes``, ``each_bytes`` of one, their common ``name``, all that hold one (``held_by``),
    and ``lives``: when each was born and died (None: before recording began, and not freed).
    """
    groups = groups_of(views, rows)
    sums = [int(views.timeline.size[group].sum()) for group in groups]
    order = sorted(range(len(groups)), key=lambda i: (-sums[i], int(groups[i][0])))
    return [_described(views, groups[i], sums[i]) for i in order[:top]]


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


def _described(views: Described, group: I64, total: int) -> dict[str, Any]:
    line, found = views.timeline, views.attribution
    first = views.allocation(int(group[0]))
    names = [found.names[int(i)] or "" for i in distinct(found.name[group])]
    born = np.where(line.alloc_event[group] >= 0, line.born_us[group], -1)
    lives = [
        [None if b < 0 else b, None if d < 0 else d]
        for b, d in zip(born.tolist(), line.died_us[group].tolist(), strict=True)
    ]
    held = [who for row in group.tolist() for who in views.holders.get(row, [])] if views.holders else []
    return {
        **first,
        "count": len(group),
        "bytes": total,
        "each_bytes": first["bytes"],
        "requested_bytes": int(line.requested[group].sum()),
        "name": common_name(names) or None,
        "held_by": list(dict.fromkeys(held)),
        "lives": lives,
    }


def fold(listed: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Fold allocations described one by one, as a report lists them, into groups as :func:`largest_groups` returns."""
    alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for allocation in listed:
        alike.setdefault(_likeness(allocation), []).append(allocation)
    folded = [_folded(group) for group in alike.values()]
    return sorted(folded, key=lambda group: -int(group["bytes"]))


def _likeness(allocation: Mapping[str, Any]) -> tuple[Any, ...]:
    name = _name_pattern(allocation.get("name")) + tag_shape(allocation.get("tag"))
    stack, others = allocation.get("stack") or [], allocation.get("alternatives") or []
    return (*(allocation.get(k) for k in _SHARED), name, tuple(stack), tuple(others))


def _folded(group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = group[0]
    return {
        **first,
        "count": len(group),
        "bytes": sum(a["bytes"] for a in group),
        "each_bytes": first["bytes"],
        "name": common_name([str(a.get("name") or "") for a in group]) or None,
        "held_by": list(dict.fromkeys(who for a in group for who in a.get("held_by") or [])),
        "lives": [[a.get("born_us"), a.get("died_us")] for a in group],
    }


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
