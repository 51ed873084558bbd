"""Repeat a generation's decoding steps from the logs of a few of them: thousands of steps, none of which is executed.

A decoding step does what the step before did, with tensors that are one token longer. From two logged steps every one
between them follows: sizes and shapes grow by the same number of elements at every token. What kernels ask for beside
their results follows from the shapes. The allocator's model runs each step (:mod:`memprof.allocator.growth`); the trace
tells of the steps that were logged, and where the others' blocks lie from time to time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from memprof.allocator.growth import DROP, DROP_OLD, TAKE, GrowthReplay, Operation, Step
from memprof.allocator.model import Block, CachingAllocator, OutOfMemory
from memprof.simulate.recorder.kernel_workspaces import hidden_bytes
from memprof.simulate.recorder.recorder import FakeRecorder
from memprof.simulate.recorder.rehearsal import Claim, Given, Kernel, Logged, Meta, Rehearsal, Taken, Workspace
from memprof.simulate.recorder.work import Tally

__all__ = ["Decoding", "NotAlike", "Run", "learn"]

_OWN, _BEFORE = 0, 1  # whose block is given back: this step's, the step before's; else -1 - the step's number
_Asked = tuple[tuple[int, ...], ...]
_TOLD = 24  # how often the trace is told where the blocks of steps that are not told of lie


class NotAlike(Exception):
    """Steps do not repeat one another; the message says what does not."""


class Run(NamedTuple):
    """Hold the log of a few tokens generated after a prompt of ``prompt`` tokens: the prompt's forward, each token, and
    what follows the last. ``work`` is what each of these parts computes."""

    prompt: int
    rehearsal: Rehearsal
    work: list[Tally]


class _Rest(NamedTuple):
    """All is given back that is left of the prompt's forward and of the first token."""


@dataclass(frozen=True)
class _Span:
    """Hold steps ``first`` to ``last``, none of them logged, between two that are."""

    first: int
    last: int
    before: list[Logged]
    after: list[Logged]

    @property
    def steps(self) -> int:
        return self.last - self.first + 2


@dataclass(frozen=True)
class Decoding:
    """Hold a whole generation: the logs of the steps that are known, by number, the spans between them, and the end."""

    logs: dict[int, list[Logged]]
    spans: dict[int, _Span]
    end: list[Logged | _Rest]
    runs: tuple[Run, ...]

    @property
    def repeated(self) -> int:
        """Count the steps that are in no log."""
        return sum(span.last - span.first + 1 for span in self.spans.values())


def learn(runs: Sequence[Run], tokens: int) -> Decoding:
    """Put together a generation of ``tokens`` after the first run's prompt.

    Raises:
        NotAlike: the steps between two runs cannot be read off these.
    """
    prompt = runs[0].prompt
    logs: dict[int, list[Logged]] = {}
    for run in runs:
        if not run.rehearsal.usable:
            raise NotAlike("it does more than take and give back memory")
        if run.rehearsal.alive:
            raise NotAlike("something that it made outlives it")
        for part in range(0 if run is runs[0] else 3, len(run.rehearsal.parts) - 1):
            logs[part + run.prompt - prompt] = _placed(run.rehearsal.parts[part], part, run is runs[0])
    end = _end_of(runs[-1], runs[-1] is runs[0])
    spans = {}
    for number, after in zip(sorted(logs), sorted(logs)[1:], strict=False):
        if after > number + 1:
            spans[number + 1] = _span(logs, number, after)
    return Decoding({n: log for n, log in logs.items() if n <= tokens}, spans, end, tuple(runs))


def _end_of(run: Run, first: bool) -> list[Logged | _Rest]:
    """Return what follows the last token; a later run's first parts stand for those of the first run."""
    log, part = run.rehearsal.parts[-1], len(run.rehearsal.parts) - 1
    found: list[Logged | _Rest] = []
    for entry in log:
        if isinstance(entry, Given) and entry.part <= 1 and not first:
            if not any(isinstance(known, _Rest) for known in found):
                found.append(_Rest())
        else:
            found += _placed([entry], part, first)
    return found


def _placed(log: list[Logged], part: int, first: bool) -> list[Logged]:
    """Say whose block is given back in terms that hold for every step."""
    found: list[Logged] = []
    for entry in log:
        if isinstance(entry, (Given, Claim)):
            whose = part - entry.part
            if whose not in (_OWN, _BEFORE):
                if entry.part > 1 or not first:
                    raise NotAlike("what a step makes outlives the step after it")
                whose = -1 - entry.part
            entry = entry._replace(part=whose)
        found.append(entry)
    return found


def _span(logs: dict[int, list[Logged]], before: int, after: int) -> _Span:
    span = _Span(before + 1, after - 1, logs[before], logs[after])
    if [_kind(entry) for entry in span.before] != [_kind(entry) for entry in span.after]:
        raise NotAlike(f"token {before} and token {after} are not made in the same way")
    between = _Between(before, after)
    for one, other in zip(span.before, span.after, strict=True):
        between.at(before, one, other)
    for known in (before - 1, after + 1):
        mine = [between.at(known, a, b) for a, b in zip(span.before, span.after, strict=True) if isinstance(a, Taken)]
        if known in logs and [e.born.nbytes for e in mine] != [
            e.born.nbytes for e in logs[known] if isinstance(e, Taken)
        ]:
            raise NotAlike(f"tensors do not grow evenly from token {before} to token {after}")
    return span


def _kind(entry: Logged) -> tuple[Any, ...]:
    """Return what must be the same in all steps of a span."""
    if isinstance(entry, Taken):
        born = entry.born
        running = born.running and born.running[1:]  # not which module: some are made anew at every call
        return (Taken, entry.stream, born.dtype, born.func, born.region, running, len(born.shape))
    if isinstance(entry, Kernel):
        return (Kernel, entry.func)
    return tuple(entry)


class _Between(NamedTuple):
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
                raise NotAlike(f"a size goes from {one} to {other} in {self.after - self.before} tokens")
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
                raise NotAlike("a kernel has other arguments")
            return tuple(self.at(step, a, b) for a, b in zip(one, other, strict=True))
        return one


class _Steps:
    """Make the allocator's steps of a span."""

    def __init__(self, span: _Span, recorder: FakeRecorder) -> None:
        self._between = _Between(span.first - 1, span.last + 1)
        self._recorder = recorder
        self._sizes: dict[tuple[int, int, int], int] = {}  # bytes before, bytes after, stream -> number
        self._kernels: dict[Any, tuple[Kernel, Kernel]] = {}
        self._variants: dict[tuple[Any, ...], tuple[list[Operation], list[int], int]] = {}
        self.taken: list[tuple[Taken, Taken]] = []
        self._order: list[Operation | Any] = []
        for one, other in zip(span.before, span.after, strict=True):
            self._add(one, other)
        first = self._between.before
        self._at_first = [one for one, _, _ in self._sizes]
        self._growth = [self._between.at(first + 1, one, other) - one for one, other, _ in self._sizes]
        self._streams = [stream for _, _, stream in self._sizes]
        # What kernels ask for whose arguments do not grow.
        self._asked = {k: self._hidden(one) for k, (one, other) in self._kernels.items() if _alike(one, other)}

    def _add(self, one: Any, other: Any) -> None:
        if isinstance(one, Taken):
            key = (one.born.nbytes, other.born.nbytes, one.stream)
            number = self._sizes.setdefault(key, len(self._sizes))
            self._order.append(Operation(TAKE, len(self.taken), number))
            self.taken.append((one, other))
        elif isinstance(one, Given):
            if one.part not in (_OWN, _BEFORE):
                raise NotAlike("a step gives back what the first ones made")
            self._order.append(Operation(DROP if one.part == _OWN else DROP_OLD, one.place))
        elif isinstance(one, Kernel):
            kernel = (one.func, _plain(one.args), _plain(other.args), _plain(one.made))
            args, made = _shared(one.args, other.args), _shared(one.made, other.made)
            self._kernels.setdefault(kernel, (one, other._replace(args=args, made=made)))
            self._order.append(kernel)

    @property
    def places(self) -> int:
        return len(self.taken)

    def at(self, step: int) -> Step:
        """Return one step."""
        known, between, done = self._asked, self._between, step - self._between.before
        variant = tuple(
            known[name] if name in known else self._hidden(between.at(step, one, other))
            for name, (one, other) in self._kernels.items()
        )
        if variant not in self._variants:
            self._variants[variant] = self._operations(dict(zip(self._kernels, variant, strict=True)))
        operations, more, places = self._variants[variant]
        sizes = [one + grown * done for one, grown in zip(self._at_first, self._growth, strict=True)]
        return Step(operations, sizes + more, self._streams + [0] * len(more), places)

    def _hidden(self, kernel: Kernel) -> _Asked:
        """Return the sizes of what a kernel takes beside its results, group after group."""
        groups = hidden_bytes(kernel.func, kernel.args, kernel.kwargs, kernel.made, self._recorder.processors)
        return tuple(tuple(size for size in group if size) for group in groups)

    def _operations(self, asked: dict[Any, _Asked]) -> tuple[list[Operation], list[int], int]:
        """Put what the kernels take in its places; return the operations, the sizes that come after the others, and
        how many blocks there are."""
        found: list[Operation] = []
        more: list[int] = []
        next_place = self.places
        for entry in self._order:
            if isinstance(entry, Operation):
                found.append(entry)
                continue
            for group in asked[entry]:
                more += [size for size in group if size not in more]
                places = range(next_place, next_place + len(group))
                next_place += len(group)
                found += [
                    Operation(TAKE, place, len(self._sizes) + more.index(size))
                    for place, size in zip(places, group, strict=True)
                ]
                found += [Operation(DROP, place) for place in places]
        return found, more, next_place


def _alike(one: Kernel, other: Kernel) -> bool:
    return _plain((one.args, one.made)) == _plain((other.args, other.made))  # type: ignore[no-any-return]


def _shared(one: Any, other: Any) -> Any:
    """Return ``other`` with what is equal in ``one`` taken from there: it need not be read off at every step."""
    if type(one) is tuple:
        if len(one) != len(other):
            raise NotAlike("a kernel has other arguments")
        return tuple(_shared(a, b) for a, b in zip(one, other, strict=True))
    return one if _plain(one) == _plain(other) else other


def _plain(value: Any) -> Any:
    if isinstance(value, Meta):
        return (value.shape, value.strides, value.dtype)
    return tuple(_plain(v) for v in value) if isinstance(value, tuple) else value


class Player:
    """Repeat a generation on a recorder's device: ``whole``, or of each span of repeated steps the last one only."""

    def __init__(self, recorder: FakeRecorder, decoding: Decoding, *, whole: bool = True) -> None:
        self._recorder, self._whole = recorder, whole
        self._decoding = decoding
        self._first: list[dict[int, int]] = []  # addresses of the first two steps' blocks, by place
        self._before: dict[int, int] = {}

    def play(self) -> None:
        """Take and give back what the whole generation does.

        Raises:
            OutOfMemory: the simulated device is full.
        """
        decoding = self._decoding
        last = max(decoding.logs)
        number = 0
        while number <= last:
            span = decoding.spans.get(number)
            if span is None:
                self._tell(decoding.logs[number])
                number += 1
            else:
                self._repeat(span)
                number = span.last + 1
        self._tell(decoding.end)

    def _tell(self, log: Sequence[Logged | _Rest]) -> None:
        """Do what a log says, and let the trace tell it."""
        recorder, own = self._recorder, {}
        place = 0
        for entry in log:
            if isinstance(entry, Taken):
                own[place] = recorder.take(entry.born.nbytes, entry.stream, entry.captured, recorder.tag_of(entry.born))
                place += 1
            elif isinstance(entry, Given):
                recorder.release(self._of(entry.part, own).pop(entry.place))
            elif isinstance(entry, Claim):
                self._claim(entry, self._of(entry.part, own)[entry.place])
            elif isinstance(entry, Kernel):
                recorder.run_kernel(entry.func, entry.args, entry.kwargs, entry.made)
            elif isinstance(entry, Workspace):
                recorder.claim_workspace()
            elif isinstance(entry, _Rest):
                self._give_back_first()
        if len(self._first) < 2:
            self._first.append(own)
        self._before = own

    def _give_back_first(self) -> None:
        for blocks in self._first:
            for address in blocks.values():
                self._recorder.release(address)
            blocks.clear()

    def _of(self, whose: int, own: dict[int, int]) -> dict[int, int]:
        return own if whose == _OWN else self._before if whose == _BEFORE else self._first[-1 - whose]

    def _claim(self, entry: Claim, address: int) -> None:
        if self._recorder.owners is not None:
            self._recorder.owners.claim_address(address, entry.category, entry.detail, entry.name)

    def _repeat(self, span: _Span) -> None:
        if not self._whole or not isinstance(self._recorder.allocator, CachingAllocator):
            # Without an allocator a block is what was asked for: the span's last step leaves what all of them leave.
            between = _Between(span.first - 1, span.last + 1)
            pairs = zip(span.before, span.after, strict=True)
            self._tell([between.at(span.last, one, other) for one, other in pairs])
            return
        _Repeating(self._recorder, self._recorder.allocator, span, self._before).run()


class _Repeating:
    """Run a span's steps in the allocator's model; tell the trace from time to time where their blocks lie."""

    def __init__(
        self, recorder: FakeRecorder, allocator: CachingAllocator, span: _Span, before: dict[int, int]
    ) -> None:
        self._recorder, self._allocator, self._span = recorder, allocator, span
        self._steps = _Steps(span, recorder)
        self._addresses = before  # as told, by place
        blocks: list[Block | None] = [None] * self._steps.places
        for place, address in before.items():
            blocks[place] = allocator.block_at(address)
        self._told = [(b.address, b.requested, b.pool.stream) for b in blocks if b is not None]
        self._replay = GrowthReplay(allocator, blocks)
        self._at = span.first
        self._claims = {e.place: e for e in span.before if isinstance(e, Claim) and e.part == _OWN}

    def run(self) -> None:
        span, allocator, recorder = self._span, self._allocator, self._recorder
        heights = [allocator.max_allocated, allocator.max_reserved, allocator.max_active, allocator.max_requested]
        allocator.max_allocated, allocator.max_reserved = allocator.allocated, allocator.reserved
        allocator.max_active, allocator.max_requested = allocator.active, allocator.requested
        allocator.before_release = self._tell_now
        every = max(1, span.steps // _TOLD)
        try:
            with recorder.untold(self._cause):
                for self._at in range(span.first, span.last + 1):
                    self._replay.run(self._steps.at(self._at))
                    if (self._at - span.first) % every == every - 1:
                        self._tell_settled()
                self._tell_settled()
        except OutOfMemory as error:
            recorder.tell_oom(error, self._cause()[0])
            raise
        finally:
            allocator.before_release = None
            now = [allocator.max_allocated, allocator.max_reserved, allocator.max_active, allocator.max_requested]
            recorder.widen_window(*now)
            most = [max(a, b) for a, b in zip(heights, now, strict=True)]
            allocator.max_allocated, allocator.max_reserved, allocator.max_active, allocator.max_requested = most

    def _cause(self) -> tuple[Any, str]:
        """Return the stack and tag of what is taken now."""
        place = self._replay.place
        if place >= self._steps.places:  # a kernel's own memory
            return None, ""
        taken = self._taken(place)
        return taken.captured, self._recorder.tag_of(taken.born)

    def _taken(self, place: int, step: int | None = None) -> Taken:
        between = _Between(self._span.first - 1, self._span.last + 1)
        taken: Taken = between.at(self._at if step is None else step, *self._steps.taken[place])
        return taken

    def _tell_settled(self) -> None:
        blocks = self._replay.settle()
        self._tell((place, self._at, block) for place, block in enumerate(blocks) if block is not None)
        self._addresses.clear()
        self._addresses.update({place: b.address for place, b in enumerate(blocks) if b is not None})

    def _tell_now(self) -> None:
        self._tell((place, self._at - (not own), block) for own, place, block in self._replay.catch_up())

    def _tell(self, blocks: Iterator[tuple[int, int, Block]]) -> None:
        """Tell the trace where blocks lie: their number, the step that took them, the block."""
        now, claims = [], []
        for place, step, block in blocks:
            where = (block.address, block.requested, block.pool.stream)
            if place < self._steps.places:
                taken = self._taken(place, step)
                now.append((*where, taken.captured, self._recorder.tag_of(taken.born)))
                claims.append((self._claims.get(place), block.address))
            else:
                now.append((*where, None, ""))
        self._recorder.retell(self._told, now)
        self._told = [row[:3] for row in now]
        for claim, address in claims:
            if claim is not None and self._recorder.owners is not None:
                self._recorder.owners.claim_address(address, claim.category, claim.detail, claim.name)
