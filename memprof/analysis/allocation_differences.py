"""What a run held at its peak as a multiset of (stack, size), and what one multiset has over another."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from memprof.analysis.analysis import Analysis

__all__ = ["Holdings", "Surplus", "holdings_of_analysis", "holdings_of_report", "stack_key", "surplus"]

Key = tuple[tuple[str, ...], int]

_LIBRARY = re.compile(r"(?:^|[/\\])(?:site-packages|dist-packages|python3\.\d+)[/\\]")


@dataclass(frozen=True)
class Holdings:
    """Blocks alive at the peak, by stack and block size.

    ``examples`` names one block of each kind and ``describe`` tells all about it. Where not every block is known, those
    of up to ``cutoff`` bytes may be missing; it is 0 where every block is there.
    """

    counts: Mapping[Key, int]
    examples: Mapping[Key, int]
    describe: Callable[[int], Mapping[str, Any]]
    cutoff: int


@dataclass(frozen=True)
class Surplus:
    """Blocks of one stack and size that one run holds more of than the other."""

    each_bytes: int
    count_in: int
    count_not_in: int
    example: Mapping[str, Any]

    @property
    def bytes(self) -> int:
        """What the blocks without a counterpart come to."""
        return self.each_bytes * (self.count_in - self.count_not_in)


def stack_key(stack: Sequence[str]) -> tuple[str, ...]:
    """A stack as two runs may share it: file names and functions, innermost first.

    Folders differ between machines and line numbers between versions, so neither counts; nor do the outermost frames,
    the script that called into a library, where there is a library below them.
    """
    last = max((i for i, frame in enumerate(stack) if _LIBRARY.search(frame)), default=len(stack) - 1)
    return tuple(_frame_key(frame) for frame in stack[: last + 1])


def _frame_key(frame: str) -> str:
    location, _, function = frame.partition(" ") if "\\" not in frame else frame.rpartition(" ")
    file = re.split(r"[/\\]", location)[-1]
    return f"{file.rpartition(':')[0] or file} {function}"


def holdings_of_analysis(analysis: Analysis) -> Holdings:
    """Every block alive at the allocated peak of an analysed snapshot."""
    line = analysis.timeline
    rows = line.alive_at(line.peak_instant)
    kinds, first, counts = np.unique(
        np.stack([line.stack[rows].astype(np.int64), line.size[rows].astype(np.int64)]),
        axis=1,
        return_index=True,
        return_counts=True,
    )
    keys: dict[int, tuple[str, ...]] = {}
    held: dict[Key, int] = {}
    examples: dict[Key, int] = {}
    for (stack, size), row, count in zip(kinds.T.tolist(), rows[first].tolist(), counts.tolist(), strict=True):
        if stack not in keys:
            keys[stack] = stack_key([str(frame) for frame in analysis.snapshot.stacks.of(stack)])
        key = (keys[stack], size)
        held[key] = held.get(key, 0) + count
        examples.setdefault(key, row)
    return Holdings(held, examples, analysis.allocation, 0)


def holdings_of_report(report: Mapping[str, Any]) -> Holdings:
    """The blocks a report lists, which may be the largest only."""
    listed = report["peak"]["allocations"]
    held: dict[Key, int] = {}
    examples: dict[Key, int] = {}
    for i, allocation in enumerate(listed):
        key = (stack_key(allocation["stack"]), allocation["bytes"])
        held[key] = held.get(key, 0) + 1
        examples.setdefault(key, i)
    complete = sum(a["bytes"] for a in listed) >= report["peak"]["active_bytes"]
    smallest = min((a["bytes"] for a in listed), default=report["peak"]["active_bytes"])
    return Holdings(held, examples, listed.__getitem__, 0 if complete else smallest)


def surplus(one: Holdings, other: Holdings) -> list[Surplus]:
    """What ``one`` holds more of than ``other``, the largest sum first; only sizes known in both."""
    cutoff = max(one.cutoff, other.cutoff)
    found = [
        Surplus(key[1], count, other.counts.get(key, 0), one.describe(one.examples[key]))
        for key, count in one.counts.items()
        if key[1] > cutoff and count > other.counts.get(key, 0)
    ]
    return sorted(found, key=lambda s: -s.bytes)
