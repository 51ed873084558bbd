"""Derive decoding steps that were not executed: those between two logged ones, or those of a period that recurs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from memprof.allocator.model import DROP, DROP_OLD, TAKE
from memprof.simulate.recorder.decode_log import Given, Kernel, Logged, LoggedOwner, Meta, Taken, plain
from memprof.simulate.recorder.kernel_workspaces import hidden_bytes
from memprof.simulate.recorder.reductions import Processors

#: Whose block is given back: this step's, the step before's, one that the last jump kept (by its number among those);
#: else -1 - the step's number.
OWN, BEFORE, KEPT = 0, 1, 2


class PatternMismatch(Exception):
    """Steps do not repeat one another; the message says what does not."""


@dataclass(frozen=True)
class StepSpan:
    """Hold steps ``first`` to ``last``, none of them logged, between two that are."""

    first: int
    last: int
    before: list[Logged]
    after: list[Logged]

    @property
    def steps(self) -> int:
        return self.last - self.first + 2

    @property
    def rows(self) -> list[tuple[Logged, ...]]:
        """Return what the two logged steps do, operation by operation."""
        return list(zip(self.before, self.after, strict=True))

    def base(self, step: int) -> int:
        """Return the step from which on sizes grow evenly up to this one."""
        return self.first - 1

    def read(self, step: int, row: Any) -> Any:
        """Read off what one of :attr:`rows`, or anything made of such, is in a step."""
        return Between(self.first - 1, self.last + 1).at(step, *row)


class Jumps(NamedTuple):
    """Number the steps that leave something behind for all steps up to the next of them: a quantised cache quantises
    everything. The first one, how many steps lie between two, how many there are."""

    first: int
    length: int
    times: int

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.length * self.times, self.length)


class Periods:
    """Hold the steps between the first and the last of some jumps, whose logs are ``first`` and ``last``: those of the
    steps around the jump, by how many steps they come after it."""

    def __init__(self, jumps: Jumps, first: dict[int, list[Logged]], last: dict[int, list[Logged]]) -> None:
        self.jumps = jumps
        self.offsets = range(min(first), max(first) + 1)
        self._over = Between(0, jumps.times - 1)
        self._around = {o: list(zip(first[o], last[o], strict=True)) for o in self.offsets}
        after, before = self.offsets[-1], self.offsets[0]
        self.inner_rows = list(zip(first[after], first[before], last[after], last[before], strict=True))
        self._known: dict[Any, Any] = {}
        self._period = -1

    @property
    def first(self) -> int:
        """Return the first step that is not logged."""
        return self.jumps.first + self.offsets[-1] + 1

    @property
    def last(self) -> int:
        """Return the last step that is not logged."""
        return self.jumps.numbers[-1] + self.offsets[0] - 1

    def inner(self, period: int) -> range:
        """Number the steps after a jump (0: the first) that do not belong to a jump."""
        begin = self.jumps.numbers[period]
        return range(begin + self.offsets[-1] + 1, begin + self.jumps.length + self.offsets[0])

    def rows(self, offset: int) -> list[tuple[Logged, ...]]:
        """Return what the steps so far from a jump do, operation by operation: around the first and the last jump."""
        return list(self._around[offset])

    def read(self, step: int, row: Any) -> Any:
        """Read off what one of a jump's :meth:`rows` is in a step around any jump."""
        jump = (step - self.jumps.first - self.offsets[0]) // self.jumps.length
        return self._over.at(jump, *row)

    def inner_base(self, step: int) -> int:
        """Return the jump from which on the sizes of the steps between two jumps grow evenly up to this one."""
        return step - (step - self.jumps.first) % self.jumps.length

    def read_inner(self, step: int, row: Any) -> Any:
        """Read off what one of :attr:`inner_rows` is in a step between two jumps."""
        period, into = divmod(step - self.jumps.first, self.jumps.length)
        if period != self._period:
            self._known, self._period = {}, period
        if id(row) not in self._known:
            one, other, far_one, far_other = row
            # The second corner lies before the first jump: one period earlier than the first.
            ends = self._over.at(period, one, far_one), self._over.at(period + 1, other, far_other)
            self._known[id(row)] = row, ends  # the row, so that no other one gets its id
        within = Between(self.offsets[-1], self.jumps.length + self.offsets[0])
        return within.at(into, *self._known[id(row)][1])


def kind(entry: Logged) -> tuple[Any, ...]:
    """Return what must be the same in all steps that repeat one another."""
    if isinstance(entry, Taken):
        born = entry.born
        running = born.running and born.running[1:]  # not which module: some are made anew at every call
        return (Taken, entry.stream, born.dtype, born.func, born.region, running, len(born.shape))
    if isinstance(entry, Kernel):
        return (Kernel, entry.func)
    return tuple(entry)


class Between(NamedTuple):
    """Read off what lies between (or next to) two steps."""

    before: int
    after: int

    def at(self, step: int, one: Any, other: Any) -> Any:
        """Read off a number, or anything made of numbers."""
        if one is other:
            return one
        if type(one) is int:
            grown, odd = divmod(other - one, self.after - self.before)
            if odd:
                raise PatternMismatch(f"a size goes from {one} to {other} in {self.after - self.before} tokens")
            return one + grown * (step - self.before)
        if isinstance(one, Taken):
            born = one.born
            shape = self.at(step, born.shape, other.born.shape)
            return one._replace(born=born._replace(nbytes=self.at(step, born.nbytes, other.born.nbytes), shape=shape))
        if isinstance(one, Kernel):
            args, made = self.at(step, one.args, other.args), self.at(step, one.made, other.made)
            return one._replace(args=args, made=made)
        if isinstance(one, Meta):
            return Meta(self.at(step, one.shape, other.shape), self.at(step, one.strides, other.strides), one.dtype)
        if type(one) is tuple:
            if len(one) != len(other):
                raise PatternMismatch("a kernel has other arguments")
            return tuple(self.at(step, a, b) for a, b in zip(one, other, strict=True))
        return one


class Operation(NamedTuple):
    """One operation of a step (:meth:`CachingAllocator.run`): ``place`` numbers blocks, ``size`` sizes."""

    kind: int
    place: int
    size: int = -1


class Step(NamedTuple):
    """One step: ``sizes`` are bytes, more than 0, ``streams`` belong to them; ``places`` counts the step's blocks."""

    operations: Sequence[Operation]
    sizes: Sequence[int]
    streams: Sequence[int]
    places: int


class StepReplay:
    """Make the allocator's steps of logged ones.

    Args:
        rows: what the logged steps do, operation by operation.
        read: reads off what a row is in a step.
        base: tells from which step on sizes grow by the same at every step up to the one asked for.
        processors: of the card; kernels' own memory depends on them.
        kept: how many blocks a jump keeps; they come before those of the step before, by place.
    """

    def __init__(
        self,
        rows: Iterable[Sequence[Logged]],
        read: Callable[[int, Any], Any],
        base: Callable[[int], int],
        processors: Processors,
        kept: int = 0,
    ) -> None:
        self.read, self._base = read, base
        self._processors, self._kept = processors, kept
        self._numbers: dict[tuple[tuple[int, ...], int], int] = {}  # bytes in each logged step, stream -> number
        self._kernels: dict[Any, tuple[Kernel, ...]] = {}
        # By how many sizes the kernels ask for; and how many blocks the operations number.
        self._operations: dict[tuple[Any, ...], tuple[list[Operation], int]] = {}
        self.taken: list[tuple[Taken, ...]] = []
        self.claims: dict[int, LoggedOwner] = {}
        self._order: list[Operation | Any] = []
        for row in rows:
            self._add(row)
        self._sizes = [sizes for sizes, _ in self._numbers]
        self._streams = [stream for _, stream in self._numbers]
        # What kernels ask for whose arguments do not grow.
        self._asked = {name: self._hidden(row[0]) for name, row in self._kernels.items() if _alike(row)}
        self._begin, self._at_begin, self._growth = -1, [0], [0]

    def _add(self, row: Sequence[Any]) -> None:
        one = row[0]
        if isinstance(one, Taken):
            key = (tuple(entry.born.nbytes for entry in row), one.stream)
            number = self._numbers.setdefault(key, len(self._numbers))
            self._order.append(Operation(TAKE, len(self.taken), number))
            self.taken.append(tuple(row))
        elif isinstance(one, Given):
            if one.part not in (OWN, BEFORE, KEPT):
                raise PatternMismatch("a step gives back what the first ones made")
            place = one.place + (self._kept if one.part == BEFORE else 0)
            self._order.append(Operation(DROP if one.part == OWN else DROP_OLD, place))
        elif isinstance(one, Kernel):
            kernel = (one.func, *(plain(entry.args) for entry in row), plain(one.made))
            alike = (e._replace(args=_shared(one.args, e.args), made=_shared(one.made, e.made)) for e in row[1:])
            self._kernels.setdefault(kernel, (one, *alike))
            self._order.append(kernel)
        elif isinstance(one, LoggedOwner) and one.part == OWN:
            self.claims[one.place] = one

    @property
    def places(self) -> int:
        return len(self.taken)

    def at(self, step: int) -> Step:
        """Return one step."""
        known = self._asked
        asked = [
            known[name] if name in known else self._hidden(self.read(step, row)) for name, row in self._kernels.items()
        ]
        counts = tuple(tuple(len(group) for group in groups) for groups in asked)
        more = [size for groups in asked for group in groups for size in group]
        if counts not in self._operations:
            self._operations[counts] = self._in_order(dict(zip(self._kernels, counts, strict=True)))
        operations, places = self._operations[counts]
        return Step(operations, self._sizes_at(step) + more, self._streams + [0] * len(more), places)

    def _sizes_at(self, step: int) -> list[int]:
        begin = self._base(step)
        if begin != self._begin:
            first, second = ([self.read(number, row) for row in self._sizes] for number in (begin, begin + 1))
            self._begin, self._at_begin = begin, first
            self._growth = [after - before for before, after in zip(first, second, strict=True)]
        done = step - begin
        return [one + grown * done for one, grown in zip(self._at_begin, self._growth, strict=True)]

    def _hidden(self, kernel: Any) -> list[list[int]]:
        """Return the sizes of what a kernel takes beside its results, group after group."""
        groups = hidden_bytes(kernel, self._processors)
        return [[size for size in group if size] for group in groups]

    def _in_order(self, counts: dict[Any, tuple[int, ...]]) -> tuple[list[Operation], int]:
        """Put what the kernels take in its places: so many sizes in each of a kernel's groups, after all others.

        Return the operations, and how many blocks they number.
        """
        first, at = {}, len(self._numbers)
        for kernel, groups in counts.items():
            first[kernel] = at
            at += sum(groups)
        found: list[Operation] = []
        next_place = self.places
        for entry in self._order:
            if isinstance(entry, Operation):
                found.append(entry)
                continue
            size = first[entry]
            for count in counts[entry]:
                places = range(next_place, next_place + count)
                found += [Operation(TAKE, place, size + index) for index, place in enumerate(places)]
                found += [Operation(DROP, place) for place in places]
                next_place, size = next_place + count, size + count
        return found, next_place


def _alike(row: Sequence[Kernel]) -> bool:
    return len({plain((kernel.args, kernel.made)) for kernel in row}) == 1


def _shared(one: Any, other: Any) -> Any:
    """Return ``other`` with what is equal in ``one`` taken from there: it need not be read off at every step."""
    if type(one) is tuple:
        if len(one) != len(other):
            raise PatternMismatch("a kernel has other arguments")
        return tuple(_shared(a, b) for a, b in zip(one, other, strict=True))
    return one if plain(one) == plain(other) else other
