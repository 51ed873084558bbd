"""Compare the blocks two runs hold at their peaks, as multisets of (stack, size, category)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from memprof.analysis.allocations.places import is_users
from memprof.report import Report
from memprof.report.allocations import Allocation
from memprof.report.comparison import Surplus
from memprof.vocabulary import Category

Key = tuple[tuple[str, ...], int, Category]

_LIBRARY = re.compile(r"(?:^|[/\\])(?:site-packages|dist-packages|python3\.\d+)[/\\]")


@dataclass(frozen=True)
class Holdings:
    """Hold the blocks alive at the peak, counted by stack, block bytes and category.

    ``examples`` names one block of each kind and ``describe`` returns all that is known of it. Blocks of up to
    ``cutoff`` bytes may be missing; ``cutoff`` is 0 where every block is known.
    """

    counts: Mapping[Key, int]
    examples: Mapping[Key, int]
    describe: Callable[[int], Allocation]
    cutoff: int


def stack_key(stack: Sequence[str]) -> tuple[str, ...]:
    """Reduce a stack to the part two runs can share: file names and functions, innermost first.

    Folders differ between machines and line numbers between versions, so neither is kept. Where the stack enters a
    library, the frames of the script that called it are left out too.
    """
    last = max((i for i, frame in enumerate(stack) if _LIBRARY.search(frame)), default=len(stack) - 1)
    return tuple(_frame_key(frame) for frame in stack[: last + 1])


def _frame_key(frame: str) -> str:
    location, _, function = frame.partition(" ") if "\\" not in frame else frame.rpartition(" ")
    file = re.split(r"[/\\]", location)[-1]
    return f"{file.rpartition(':')[0] or file} {function}"


def holdings_of_report(report: Report) -> Holdings:
    """Return the blocks that a report lists, which may be only the largest."""
    listed = report.peak.allocations
    held: dict[Key, int] = {}
    examples: dict[Key, int] = {}
    for i, allocation in enumerate(listed):
        key = (stack_key(allocation.stack), allocation.bytes, allocation.category)
        held[key] = held.get(key, 0) + 1
        examples.setdefault(key, i)
    complete = sum(a.bytes for a in listed) >= report.peak.active_bytes
    smallest = min((a.bytes for a in listed), default=report.peak.active_bytes)
    return Holdings(held, examples, listed.__getitem__, 0 if complete else smallest)


@dataclass(frozen=True)
class StackDifference:
    """Hold what two runs allocate differently with one stack and category, whatever the sizes.

    ``before`` are the blocks of which the first run has more, ``after`` those of which the other has more.
    """

    before: tuple[Surplus, ...]
    after: tuple[Surplus, ...]

    @property
    def difference(self) -> int:
        """The bytes that the other run has more than the first; negative if it has less."""
        return sum(s.bytes for s in self.after) - sum(s.bytes for s in self.before)

    @property
    def largest(self) -> Surplus:
        """The largest entry of the run that has more."""
        more, less = (self.after, self.before) if self.difference > 0 else (self.before, self.after)
        return max(more or less, key=lambda s: s.bytes)


def by_stack(before: Sequence[Surplus], after: Sequence[Surplus]) -> list[StackDifference]:
    """Match what each of two runs has more of by stack, the largest difference first.

    Blocks of one stack that have another size are a change of that size, not allocations of one run only. What has no
    counterpart by its whole stack is matched by the program's frames with their lines, then without: another dtype or
    an autocast changes the kernels below the same line.
    """
    left = (list(before), list(after))
    found = []
    for key in (_whole_stack, _program_lines, _program_functions):
        sides = [_grouped(entries, key) for entries in left]
        both = [k for k in sides[0] if k in sides[1]]
        found += [StackDifference(tuple(sides[0].pop(k)), tuple(sides[1].pop(k))) for k in both]
        left = (_ungrouped(sides[0]), _ungrouped(sides[1]))
    found += [StackDifference(tuple(group), ()) for group in _grouped(left[0], _whole_stack).values()]
    found += [StackDifference((), tuple(group)) for group in _grouped(left[1], _whole_stack).values()]
    return sorted(found, key=lambda change: -abs(change.difference))


_StackKey = tuple[object, ...]


def _grouped(
    entries: Iterable[Surplus], key: Callable[[Surplus], _StackKey | None]
) -> dict[_StackKey, list[Surplus]]:
    """Group entries by a key and their category; each without a key stays alone."""
    groups: dict[_StackKey, list[Surplus]] = {}
    for entry in entries:
        where = key(entry)
        groups.setdefault((id(entry),) if where is None else (where, entry.category, entry.detail), []).append(entry)
    return groups


def _ungrouped(groups: Mapping[_StackKey, list[Surplus]]) -> list[Surplus]:
    return [entry for group in groups.values() for entry in group]


def _whole_stack(entry: Surplus) -> _StackKey:
    """Return a stack's key; without a stack the names decide, but for their digits."""
    return stack_key(entry.stack) or (re.sub(r"\d+", "*", entry.name or ""),)


def _program_lines(entry: Surplus) -> _StackKey | None:
    frames = [re.split(r"[/\\]", frame)[-1] for frame in entry.stack if is_users(frame)]
    return tuple(frames) or None


def _program_functions(entry: Surplus) -> _StackKey | None:
    return tuple(_frame_key(frame) for frame in entry.stack if is_users(frame)) or None


def surplus(one: Holdings, other: Holdings) -> list[Surplus]:
    """List the blocks ``one`` holds more of than ``other``, the largest sum first; only sizes known in both count."""
    cutoff = max(one.cutoff, other.cutoff)
    found = []
    for key, count in one.counts.items():
        missing = count - (there := other.counts.get(key, 0))
        if key[1] <= cutoff or missing <= 0:
            continue
        example = one.describe(one.examples[key])
        found.append(
            Surplus(
                bytes=key[1] * missing,
                each_bytes=key[1],
                count_in=count,
                count_not_in=there,
                category=example.category,
                detail=example.detail,
                name=example.name,
                phase=example.phase,
                stack=example.stack,
            )
        )
    return sorted(found, key=lambda s: -s.bytes)
