"""Run decoding steps that were not executed through the allocator's model, and log now and then where blocks lie."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from memprof.allocator.model import Block, CachingAllocator, OutOfMemory
from memprof.allocator.repeated_decoding import DROP, DROP_OLD, TAKE, GrowthReplay
from memprof.simulate.recorder.recorder import FakeRecorder
from memprof.simulate.shortcuts.decoding.alike_steps import Periods, Span, Steps

_TOLD = 24  # how often the trace is told where the blocks of steps that are not told of lie


class _Held(NamedTuple):
    """Say of a block in use which step took it as which place."""

    steps: Steps
    place: int
    step: int
    block: Block


class _Trace:
    """Tell the trace where blocks lie, of which it knows ``told``: address, bytes, stream."""

    def __init__(self, recorder: FakeRecorder, blocks: Iterable[Block]) -> None:
        self._recorder = recorder
        self._told = [(b.address, b.requested, b.pool.stream) for b in blocks]

    def tell(self, held: Iterable[_Held]) -> None:
        """Tell where all blocks lie that the generation has in use."""
        now, claims = [], []
        for steps, place, step, block in held:
            captured, tag = self.cause(steps, place, step)
            now.append((block.address, block.requested, block.pool.stream, captured, tag))
            if place in steps.claims:
                claims.append((steps.claims[place], block.address))
        self._recorder.blocks.trace.move(self._told, now)
        self._told = [row[:3] for row in now]
        if (owners := self._recorder.blocks.owners) is not None:
            for claim, address in claims:
                owners.claim_address(address, claim.category, claim.detail, claim.name)

    def cause(self, steps: Steps, place: int, step: int) -> tuple[Any, str]:
        """Return the stack and tag of what a step takes."""
        if place >= steps.places:  # a kernel's own memory
            return None, ""
        taken = steps.read(step, steps.taken[place])
        return taken.captured, self._recorder.blocks.tag_of(taken.born)


@contextlib.contextmanager
def _untold(recorder: FakeRecorder, allocator: CachingAllocator, run: Any) -> Iterator[None]:
    """Leave what is taken and given back inside out of the trace, and count its heights; ``run`` tells what else
    happens (``cause``) and, before the full device gives memory back, where blocks lie (``tell_now``)."""
    heights = [allocator.max_allocated, allocator.max_reserved, allocator.max_active, allocator.max_requested]
    allocator.max_allocated, allocator.max_reserved = allocator.allocated, allocator.reserved
    allocator.max_active, allocator.max_requested = allocator.active, allocator.requested
    allocator.before_release = run.tell_now
    try:
        with recorder.blocks.trace.without_blocks(run.cause):
            yield
    except OutOfMemory as error:
        recorder.blocks.note_oom(error, run.cause()[0])
        raise
    finally:
        allocator.before_release = None
        now = [allocator.max_allocated, allocator.max_reserved, allocator.max_active, allocator.max_requested]
        recorder.blocks.windows.widen(*now)
        most = [max(a, b) for a, b in zip(heights, now, strict=True)]
        allocator.max_allocated, allocator.max_reserved, allocator.max_active, allocator.max_requested = most


class _Alike:
    """Run steps one after another that do the same with larger sizes.

    ``kept``: blocks that all of these steps leave alone.
    """

    def __init__(
        self, allocator: CachingAllocator, steps: Steps, blocks: dict[int, Block], trace: _Trace, kept: list[_Held]
    ) -> None:
        self._steps, self._trace, self._kept = steps, trace, kept
        places: list[Block | None] = [None] * max((steps.places, *(place + 1 for place in blocks)))
        for place, block in blocks.items():
            places[place] = block
        self._replay = GrowthReplay(allocator, places)
        self._at = 0

    def run(self, numbers: range, every: int = 0) -> None:
        """Run steps; tell the trace after so many of them each time, and after the last (0: never)."""
        for self._at in numbers:
            self._replay.run(self._steps.at(self._at))
            if every and (self._at == numbers[-1] or (self._at - numbers[0]) % every == every - 1):
                self._trace.tell([*self._rows(self.settled()), *self._kept])

    def settled(self) -> dict[int, Block]:
        """Return the blocks of the last step, by place."""
        return {place: block for place, block in enumerate(self._replay.settle()) if block is not None}

    def cause(self) -> tuple[Any, str]:
        """Return the stack and tag of what is taken now."""
        return self._trace.cause(self._steps, self._replay.place, self._at)

    def tell_now(self) -> None:
        """Tell the trace where blocks lie in the middle of a step."""
        rows = self._replay.catch_up()
        self._trace.tell([*(_Held(self._steps, place, self._at - (not own), b) for own, place, b in rows), *self._kept])

    def _rows(self, blocks: dict[int, Block]) -> list[_Held]:
        return [_Held(self._steps, place, self._at, block) for place, block in blocks.items()]


def repeat_span(recorder: FakeRecorder, allocator: CachingAllocator, span: Span, addresses: dict[int, int]) -> None:
    """Run a span's steps. ``addresses`` are those of the blocks of the step before, by place, and then of the last.

    Raises:
        OutOfMemory: the simulated device is full.
    """
    steps = Steps(span.rows, span.read, span.base, recorder.kernels.processors)
    blocks = {place: allocator.block_at(address) for place, address in addresses.items()}
    alike = _Alike(allocator, steps, blocks, _Trace(recorder, blocks.values()), [])
    with _untold(recorder, allocator, alike):
        alike.run(range(span.first, span.last + 1), max(1, span.steps // _TOLD))
    addresses.clear()
    addresses.update({place: block.address for place, block in alike.settled().items()})


def repeat_periods(
    recorder: FakeRecorder,
    allocator: CachingAllocator,
    periods: Periods,
    addresses: dict[int, int],
    kept: dict[int, int],
    keeps: list[int],
) -> None:
    """Run all steps between the first and the last jump.

    Args:
        recorder: is told of them.
        allocator: the recorder's.
        periods: the steps.
        addresses: of the blocks of the step before, by place; afterwards of the last step.
        kept: addresses of the blocks that the first jump kept, by number; afterwards of those of the last but one.
        keeps: the places of these in a jump.

    Raises:
        OutOfMemory: the simulated device is full.
    """
    blocks = {place: allocator.block_at(address) for place, address in addresses.items()}
    before = {place: allocator.block_at(kept[number]) for number, place in enumerate(keeps)}
    run = _PeriodsRun(recorder, allocator, periods, blocks, before)
    with _untold(recorder, allocator, run):
        run.run()
    addresses.clear()
    addresses.update({place: block.address for place, block in run.blocks.items()})
    kept.update({number: held.block.address for number, held in enumerate(run.kept)})


class _PeriodsRun:
    """Run the steps between the first and the last jump; see :func:`repeat_periods`.

    ``blocks`` are those of the step before, ``kept`` those that the first jump kept; both by place.
    """

    def __init__(
        self,
        recorder: FakeRecorder,
        allocator: CachingAllocator,
        periods: Periods,
        blocks: dict[int, Block],
        kept: dict[int, Block],
    ) -> None:
        self._allocator, self._periods, self.blocks = allocator, periods, blocks
        processors = recorder.kernels.processors
        self._inner = Steps(periods.inner_rows, periods.read_inner, periods.inner_base, processors)
        self._around = {o: Steps(periods.rows(o), periods.read, int, processors) for o in periods.offsets}
        self.kept = [_Held(self._around[0], place, periods.jumps.first, block) for place, block in kept.items()]
        self._trace = _Trace(recorder, [*self.blocks.values(), *(held.block for held in self.kept)])
        self._alike: _Alike | None = None
        self._held: list[_Held] = []
        self._now = (self._inner, 0, periods.first)

    def run(self) -> None:
        """Run all of them."""
        jumps = self._periods.jumps
        every = max(1, jumps.times // _TOLD)
        for period, jump in enumerate(jumps.numbers[1:]):
            self._between(self._periods.inner(period))
            if period < jumps.times - 2:
                for offset in self._periods.offsets:
                    self._around_jump(offset, jump + offset)
            if period % every == every - 1 or period == jumps.times - 2:
                last = min(jump + self._periods.offsets[-1], self._periods.last)
                self._trace.tell([*(_Held(self._inner, p, last, b) for p, b in self.blocks.items()), *self.kept])

    def cause(self) -> tuple[Any, str]:
        """Return the stack and tag of what is taken now."""
        return self._alike.cause() if self._alike is not None else self._trace.cause(*self._now)

    def tell_now(self) -> None:
        """Tell the trace where blocks lie in the middle of a step."""
        if self._alike is not None:
            self._alike.tell_now()
        else:
            self._trace.tell(self._in_use())

    def _between(self, numbers: range) -> None:
        self._alike = _Alike(self._allocator, self._inner, self.blocks, self._trace, self.kept)
        self._alike.run(numbers)
        self.blocks, self._alike = self._alike.settled(), None

    def _around_jump(self, offset: int, number: int) -> None:
        """Run one step around a jump, operation by operation."""
        allocator, steps = self._allocator, self._around[offset]
        step = steps.at(number)
        needs = [allocator.settings.round_size(size) for size in step.sizes]
        homes = [allocator.pool_of(need, stream) for need, stream in zip(needs, step.streams, strict=True)]
        self._own: dict[int, Block] = {}
        self._old, self._old_kept = dict(self.blocks), dict(enumerate(self.kept))
        self._around_now = (steps, number)
        for kind, place, size in step.operations:
            if kind == TAKE:
                self._now = (steps, place, number)
                self._own[place] = allocator.acquire(homes[size], needs[size], step.sizes[size])
            elif kind == DROP:
                allocator.drop(self._own.pop(place))
            elif kind == DROP_OLD:
                allocator.drop(self._old.pop(place))
            else:
                allocator.drop(self._old_kept.pop(place).block)
        if offset == 0:
            self.kept = [held._replace(step=number, block=self._own.pop(held.place)) for held in self.kept]
        self.blocks = self._own

    def _in_use(self) -> list[_Held]:
        """List the blocks in use in the middle of a step around a jump; what the step before took counts as its."""
        steps, number = self._around_now
        old = (_Held(self._inner, place, number - 1, block) for place, block in self._old.items())
        own = (_Held(steps, place, number, block) for place, block in self._own.items())
        return [*old, *own, *self._old_kept.values()]
