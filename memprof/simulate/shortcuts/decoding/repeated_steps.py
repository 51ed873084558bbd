"""Run decoding steps that were not executed through the allocator's model, and log now and then where blocks lie."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from memprof.allocator.model import AllocatorOutOfMemory, Block, CachingAllocator
from memprof.simulate.recorder.recorder import FakeRecorder
from memprof.simulate.shortcuts.decoding.identical_steps import Operation, Periods, StepReplay, StepSpan

_TOLD = 24  # how often the trace is told where the blocks of steps that are not told of lie
_TOTALS = ("allocated", "reserved", "active", "requested")


class _Taken(NamedTuple):
    """Say of a block which step took it as which place."""

    steps: StepReplay
    place: int
    step: int


def repeat_span(recorder: FakeRecorder, allocator: CachingAllocator, span: StepSpan, addresses: dict[int, int]) -> None:
    """Run a span's steps. ``addresses`` are those of the blocks of the step before, by place, and then of the last.

    Raises:
        OutOfMemory: the simulated device is full.
    """
    steps = StepReplay(span.rows, span.read, span.base, recorder.kernels.processors)
    run = _Run(recorder, allocator, steps, addresses)
    every = max(1, span.steps // _TOLD)
    with run.untold():
        for number in range(span.first, span.last + 1):
            run.step(steps, number)
            if number == span.last or (number - span.first) % every == every - 1:
                run.tell()
    run.put_addresses(addresses)


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
        recorder, allocator, periods: as of :func:`repeat_span`.
        addresses: of the blocks of the step before, by place; afterwards of the last step.
        kept: addresses of the blocks that the first jump kept, by number; afterwards of those of the last but one.
        keeps: the places of these in a jump.

    Raises:
        OutOfMemory: the simulated device is full.
    """
    jumps, processors = periods.jumps, recorder.kernels.processors
    inner = StepReplay(periods.inner_rows, periods.read_inner, periods.inner_base, processors, len(keeps))
    around = {o: StepReplay(periods.rows(o), periods.read, int, processors, len(keeps)) for o in periods.offsets}
    before = {_Taken(around[0], place, jumps.first): kept[number] for number, place in enumerate(keeps)}
    run = _Run(recorder, allocator, inner, addresses, before)
    every = max(1, jumps.times // _TOLD)
    with run.untold():
        for period, jump in enumerate(jumps.numbers[1:]):
            for number in periods.inner(period):
                run.step(inner, number)
            if period < jumps.times - 2:
                for offset in periods.offsets:
                    run.step(around[offset], jump + offset, () if offset else keeps)
            if period % every == every - 1 or period == jumps.times - 2:
                run.tell()
    run.put_addresses(addresses, kept)


class _Run:
    """Run steps one after another, each of which gives back what the one before it took.

    Args:
        recorder, allocator: the recorder is told now and then where blocks lie.
        usual: the steps off which is read what the step before took.
        addresses: of the blocks of the step before the first, by place.
        kept: addresses of what the last jump kept.
    """

    def __init__(
        self,
        recorder: FakeRecorder,
        allocator: CachingAllocator,
        usual: StepReplay,
        addresses: dict[int, int],
        kept: dict[_Taken, int] | None = None,
    ) -> None:
        self._blocks, self._allocator, self._usual = recorder.blocks, allocator, usual
        kept = kept or {}
        self._kept = list(kept)
        places = (addresses.get(place) for place in range(max(addresses, default=-1) + 1))
        # What was there before the step: first what a jump kept, then what the step before took, by place.
        self._old = [None if at is None else allocator.block_at(at) for at in (*kept.values(), *places)]
        self._own: list[Block | None] = []
        self._steps, self._number = usual, 0
        self._operations: Sequence[Operation] = ()
        in_use = [allocator.block_at(at) for at in (*addresses.values(), *kept.values())]
        self._told = [(block.address, block.requested, block.pool.stream) for block in in_use]

    def step(self, steps: StepReplay, number: int, keeps: Sequence[int] = ()) -> None:
        """Run one step; what it takes as the places ``keeps`` stays until the next jump.

        Raises:
            OutOfMemory: the device is full.
        """
        heap, step = self._allocator, steps.at(number)
        needs = [heap.settings.round_size(size) for size in step.sizes]
        homes = [heap.pool_of(need, stream) for need, stream in zip(needs, step.streams, strict=True)]
        self._steps, self._number, self._operations = steps, number, step.operations
        own = self._own = [None] * step.places
        heap.run(step.operations, homes, needs, step.sizes, own, self._old)
        kept = self._old[: len(self._kept)]
        if keeps:
            self._kept, kept = [_Taken(steps, place, number) for place in keeps], [own[place] for place in keeps]
            for place in keeps:
                own[place] = None
        self._old, self._own, self._number = [*kept, *own], [], number + 1

    def put_addresses(self, addresses: dict[int, int], kept: dict[int, int] | None = None) -> None:
        """Replace addresses by those of the last step's blocks, by place; and of what is kept, by number."""
        found = [None if block is None else block.address for block in self._old]
        first = len(self._kept)
        addresses.clear()
        addresses.update({place: at for place, at in enumerate(found[first:]) if at is not None})
        if kept is not None:
            kept.update({number: at for number, at in enumerate(found[:first]) if at is not None})

    # -- the trace -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def untold(self) -> Iterator[None]:
        """Leave what is taken and given back inside out of the trace, and count its heights. Before the full device
        gives memory back, the trace is told where blocks lie."""
        heap, blocks = self._allocator, self._blocks
        before = [getattr(heap, f"max_{name}") for name in _TOTALS]
        for name in _TOTALS:
            setattr(heap, f"max_{name}", getattr(heap, name))
        heap.before_release = self.tell
        try:
            with blocks.trace.without_blocks(self._cause):
                yield
        except AllocatorOutOfMemory as error:
            blocks.note_oom(error, self._cause()[0])
            raise
        finally:
            heap.before_release = None
            now = [getattr(heap, f"max_{name}") for name in _TOTALS]
            blocks.windows.widen(*now)
            for name, *heights in zip(_TOTALS, before, now, strict=True):
                setattr(heap, f"max_{name}", max(heights))

    def tell(self) -> None:
        """Tell the trace where all blocks lie that the generation has in use; in the middle of a step too."""
        now, claims = [], []
        for taken, block in self._in_use():
            captured, tag = self._cause_of(taken)
            now.append((block.address, block.requested, block.pool.stream, captured, tag))
            if taken.place in taken.steps.claims:
                claims.append((taken.steps.claims[taken.place], block.address))
        self._blocks.trace.move(self._told, now)
        self._told = [row[:3] for row in now]
        for claim, address in claims:
            self._blocks.claim(address, claim.category, claim.detail, claim.name)

    def _in_use(self) -> Iterator[tuple[_Taken, Block]]:
        first = len(self._kept)
        old = [_Taken(self._usual, place, self._number - 1) for place in range(len(self._old) - first)]
        own = [_Taken(self._steps, place, self._number) for place in range(len(self._own))]
        blocks = (*self._old[first:], *self._own, *self._old[:first])
        return ((taken, b) for taken, b in zip((*old, *own, *self._kept), blocks, strict=True) if b is not None)

    def _cause(self) -> tuple[Any, str]:
        place = self._operations[self._allocator.at].place if self._operations else 0
        return self._cause_of(_Taken(self._steps, place, self._number))

    def _cause_of(self, taken: _Taken) -> tuple[Any, str]:
        """Return the stack and tag of what a step takes."""
        if taken.place >= taken.steps.places:  # a kernel's own memory
            return None, ""
        found = taken.steps.read(taken.step, taken.steps.taken[taken.place])
        return found.captured, self._blocks.tag_of(found.born)
