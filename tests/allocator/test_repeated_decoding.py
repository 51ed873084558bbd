"""Steps replayed with pools parked do to the allocator what the same operations do one by one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from memprof.allocator.model import CachingAllocator, OutOfMemory
from memprof.allocator.repeated_decoding import DROP, DROP_OLD, TAKE, GrowthReplay, Operation, Step
from memprof.allocator.settings import MIB, parse_settings


class _Loop:
    """Build steps like a decoding loop's: ids that grow, a cache that grows in every layer, temporaries within a layer
    and from one to the next, and beside them what a kernel asks for, which changes every 32 steps."""

    def __init__(
        self, chance: random.Random, layers: int, token: int, width: int, *, alike: bool = True, scores: int = 0
    ) -> None:
        self.alike, self.scores = alike, scores
        self.operations: list[Operation] = []
        self.sizes: list[tuple[int, int]] = []
        self.kept: list[int] = []
        self.places = 0
        self._build(chance, layers, token, width)
        self._variants: dict[int, list[Operation]] = {}

    def _build(self, chance: random.Random, layers: int, token: int, width: int) -> None:
        self._keep(0, 64)
        stream = self._take(width, 0)
        widths, more = [chance.choice((1, 2, 3)) for _ in range(3)], chance.choice((0, 900))
        for layer in range(layers):
            work = [self._take(width * w * (1 + (not self.alike and layer)), 0) for w in widths]
            self._drop(work.pop(1))
            self._drop(self._take(width, self.scores))
            self._keep(0, token)
            self._keep(more, token)
            after = self._take(width, 0)
            for place in (stream, *work):
                self._drop(place)
            stream = after
        logits = self._take(width * 400, 0)
        self._drop(stream)
        self._drop(logits)

    def _take(self, start: int, growth: int) -> int:
        if (start, growth) not in self.sizes:
            self.sizes.append((start, growth))
        self.operations.append(Operation(TAKE, self.places, self.sizes.index((start, growth))))
        self.places += 1
        return self.places - 1

    def _drop(self, place: int) -> None:
        self.operations.append(Operation(DROP, place))

    def _keep(self, start: int, growth: int) -> None:
        self.kept.append(self._take(start, growth))
        self.operations.append(Operation(DROP_OLD, self.kept[-1]))

    def step(self, number: int) -> Step:
        buffers = number // 32
        if buffers not in self._variants:
            more = [Operation(TAKE, self.places, len(self.sizes)), Operation(DROP, self.places)] * buffers
            self._variants[buffers] = [*self.operations[:9], *more, *self.operations[9:]]
        sizes = [start + growth * number for start, growth in self.sizes] + [3000 * buffers + 1]
        return Step(self._variants[buffers], sizes, [0] * len(sizes), self.places + 1)


def begun(heap: CachingAllocator, loop: _Loop, first: int, spare: int = 0) -> dict[int, int]:
    """Take what the step before the first one leaves; ``spare`` small segments are free beside it."""
    for address in [heap.malloc(MIB)[0] for _ in range(2 * spare)]:
        heap.free(address)
    size_of = {o.place: o.size for o in loop.operations if o.kind == TAKE}
    sizes = loop.step(first - 1).sizes
    return {place: heap.malloc(sizes[size_of[place]])[0] for place in loop.kept}


def one_by_one(heap: CachingAllocator, old: dict[int, int], steps: list[Step]) -> None:
    for step in steps:
        own: dict[int, int] = {}
        for kind, place, size in step.operations:
            if kind == TAKE:
                own[place], _ = heap.malloc(step.sizes[size], step.streams[size])
            else:
                heap.free((own if kind == DROP else old).pop(place))
        old = own


def replayed(heap: CachingAllocator, old: dict[int, int], steps: list[Step]) -> GrowthReplay:
    blocks = [heap.block_at(old[n]) if n in old else None for n in range(steps[0].places)]
    replay = GrowthReplay(heap, blocks)
    heap.before_release = replay.catch_up  # type: ignore[assignment]
    for step in steps:
        replay.run(step)
    replay.settle()
    return replay


def state(heap: CachingAllocator) -> dict[str, object]:
    names = ("reserved", "active", "allocated", "requested", "flushes")
    highest = ("max_reserved", "max_active", "max_allocated", "max_requested")
    return {**{name: getattr(heap, name) for name in names + highest}, "segments": heap.segments()}


_CONFS = ["", "expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:8"]


def _cases() -> Iterator[Any]:
    """Each two of settings, sizes and layers stand together in `make test`; all three do in `make test-all`."""
    settings, tokens = [*_CONFS, "garbage_collection_threshold:0.6"], (300, 8192, 70_000, 300_000)
    layers = ((True, 0), (False, 0), (True, 20))
    for (n, conf), (m, token), (k, (alike, spare)) in itertools.product(*map(enumerate, (settings, tokens, layers))):
        often = (n + m) % len(layers) == k
        yield pytest.param(conf, token, alike, spare, marks=[] if often else [pytest.mark.heavy])


@pytest.mark.parametrize(("conf", "token", "alike", "spare"), list(_cases()))
def test_replayed_as_one_by_one(conf: str, token: int, alike: bool, spare: int) -> None:
    """On a device with room for all, and on ever smaller ones, down to where it is out of memory."""
    loop = _Loop(random.Random(token), 9, token, 4096, alike=alike, scores=40 * (spare > 0))
    steps = [loop.step(number) for number in range(20, 110)]
    whole = CachingAllocator(parse_settings(conf))
    one_by_one(whole, begun(whole, loop, 20, spare), steps)
    rest = whole.max_reserved - whole.max_allocated
    flushed = 0
    for capacity in (None, *(whole.max_allocated + int(rest * share) for share in (0.8, 0.6, 0.4, 0.3, 0.2, 0.1, 0))):
        ends = []
        heaps = [CachingAllocator(parse_settings(conf), capacity) for _ in range(2)]
        for heap, run in zip(heaps, (one_by_one, replayed), strict=True):
            try:
                run(heap, begun(heap, loop, 20, spare), steps)
                ends.append(None)
            except OutOfMemory as error:
                ends.append((error.requested, error.free))
        assert ends[0] == ends[1]
        assert heaps[0].flushes == heaps[1].flushes
        if ends[0] is None:
            assert state(heaps[0]) == state(heaps[1])
            flushed += heaps[0].flushes
    assert flushed or token < 300_000 or conf.startswith(("expandable", "garbage"))


def test_what_decides_nothing_is_not_taken() -> None:
    """Temporaries grow at every step, so that no pool can be parked, and a small pool with room is still left alone."""
    loop = _Loop(random.Random(0), 30, 700_000, 4096, scores=600)
    steps = [loop.step(number) for number in range(32, 64)]
    whole, lean = CachingAllocator(), CachingAllocator()
    one_by_one(whole, begun(whole, loop, 32, 20), steps)
    replay = replayed(lean, begun(lean, loop, 32, 20), steps)
    assert state(whole) == state(lean)
    order = replay._order_of_deciding(steps[-1])
    assert order is not None
    small = [n for kind, _, n, _ in order if kind == TAKE and steps[-1].sizes[n] <= MIB]
    assert len(small) < 5 < sum(steps[-1].sizes[o.size] <= MIB for o in steps[-1].operations if o.kind == TAKE) / 20


def test_what_does_not_change_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = _Loop(random.Random(0), 4, 70000, 4096)
    heap = CachingAllocator()
    taken: list[int] = []
    acquire = CachingAllocator.acquire

    def counted(self: CachingAllocator, home: object, need: int, size: int) -> object:
        taken.append(need)
        return acquire(self, home, need, size)  # type: ignore[arg-type]

    old = begun(heap, loop, 32)
    monkeypatch.setattr(CachingAllocator, "acquire", counted)
    replayed(heap, old, [loop.step(number) for number in range(32, 64)])
    small = [need for need in taken if need <= MIB]
    assert len(taken) - len(small) > 200
    assert len(small) < 32 * loop.places / 2
