"""The allocator's model in C does what the Python model does: event by event, total by total, block by block."""

from __future__ import annotations

import contextlib
import gc
import random
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from benchmarks.reading.fuzz_scan import sanitized
from benchmarks.tabling import ROOT
from memprof._native import replayer
from memprof.allocator import native, replay
from memprof.allocator.model import AllocatorOutOfMemory, CachingAllocator
from memprof.allocator.replay import Program
from memprof.allocator.settings import UNLIMITED, AllocatorSettings, parse_settings
from memprof.errors import UsageError
from tests.snapshot.programs import MIB, sizes

pytestmark = pytest.mark.skipif(replayer() is None, reason="the extension was not built, or MEMPROF_NATIVE=0")

Model = Callable[[AllocatorSettings, int | None], CachingAllocator]
_TOTALS = ("reserved", "active", "allocated", "requested", "flushes")
_HIGHEST = ("max_reserved", "max_active", "max_allocated", "max_requested")

configurations = st.builds(
    AllocatorSettings,
    max_split_size=st.sampled_from([UNLIMITED, UNLIMITED, 20 * MIB, 32 * MIB]),
    max_non_split_rounding=st.sampled_from([20 * MIB, 4 * MIB]),
    large_segment_size=st.sampled_from([20 * MIB, 20 * MIB, 11 * MIB]),
    garbage_collection_threshold=st.sampled_from([0.0, 0.0, 0.3, 0.6, 0.9]),
    expandable_segments=st.booleans(),
    roundup_divisions=st.sampled_from([(0,) * 16, (4,) * 16, (8, 1, 2, 4) * 4]),
    allowed_bytes=st.sampled_from([None, 40 * MIB, 100 * MIB]),
    oldest_first=st.booleans(),
)
capacities = st.sampled_from([None, 30 * MIB, 64 * MIB, 200 * MIB])
number = st.integers(0, 99)
calls = st.one_of(
    st.tuples(st.just("malloc"), sizes, st.sampled_from([0, 0, 0, 7]), st.sampled_from([0, 0, 0, 1])),
    st.tuples(st.sampled_from(["free", "drop"]), number, number, number),
    st.tuples(st.sampled_from(["empty", "unused", "huge"]), number, number, number),
)


class Watched:
    """A model, all that it answers, and all that it tells."""

    def __init__(self, model: Model, settings: AllocatorSettings, capacity: int | None, told: bool) -> None:
        self.heap = model(settings, capacity)
        self.answers: list[Any] = []
        self.live: list[int] = []
        if told:
            self.heap.on_event = lambda *event: self.answers.append((*event, self.heap.allocated, self.heap.reserved))
        self.heap.before_release = lambda: self.answers.append("full")

    def call(self, what: str, one: int, stream: int, pool: int) -> None:
        try:
            self.answers.append(self._called(what, one, stream, pool))
        except (AllocatorOutOfMemory, UsageError) as error:
            self.answers.append((type(error), str(error), vars(error)))
        self.answers.append([getattr(self.heap, name) for name in _TOTALS + _HIGHEST])

    def _called(self, what: str, one: int, stream: int, pool: int) -> object:
        heap = self.heap
        if what == "malloc":
            address, size = heap.malloc(one, stream, pool)
            self.live.append(address)
            return address, size, heap.block_at(address).requested
        if what == "huge":
            return heap.malloc([0, -1, 1 << 45, 1 << 52, (1 << 52) + 1, UNLIMITED, 1 << 63, 1 << 70][one % 8])
        if what == "empty":
            return heap.empty_cache()
        if what == "unused":
            return heap.free([12345, 1 << 70][one % 2])
        if not self.live:
            return None
        address = self.live.pop(one % len(self.live))
        return heap.drop(heap.block_at(address)) if what == "drop" else heap.free(address)

    def pools(self) -> Iterator[tuple[Any, ...]]:
        """Yield what each pool has free: bytes, and place among all segments."""
        mask = (1 << 56) - 1
        for stream, pool, need in [(s, p, n) for s in (0, 7) for p in (0, 1) for n in (512, 2 * MIB)]:
            home = self.heap.pool_of(need, stream, pool)
            free = [(key >> 56, key & mask) if isinstance(key, int) else key for key in home.free]
            yield home.small, home.stream, home.pool, free


def both(settings: AllocatorSettings, capacity: int | None, told: bool = True) -> tuple[Watched, Watched]:
    made = Watched(native.allocator, settings, capacity, told), Watched(CachingAllocator, settings, capacity, told)
    assert type(made[0].heap) is not CachingAllocator, "C leaves these settings to Python"
    return made


@limits(max_examples=150, deadline=None)
@given(configurations, capacities, st.booleans(), st.lists(calls, max_size=80))
def test_every_call_answers_as_in_python(
    configuration: AllocatorSettings, capacity: int | None, told: bool, program: list[tuple[str, int, int, int]]
) -> None:
    one, other = both(configuration, capacity, told)
    for call in program:
        one.call(*call)
        other.call(*call)
        assert one.answers == other.answers
    assert list(one.pools()) == list(other.pools())
    assert one.heap.segments() == other.heap.segments()


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:64", "roundup_power2_divisions:4"])
def test_long_programs(conf: str) -> None:
    """Tables of thousands of blocks, on a device with room for all and on one that is full again and again."""
    for capacity in (None, 2048 * MIB):
        dice = random.Random(conf)
        one, other = both(parse_settings(conf), capacity)
        for _ in range(6000):
            size = int(2 ** dice.uniform(6, 26))
            what = dice.choices(["malloc", "free", "drop", "empty"], [10, 5, 5, 0.02])[0]
            for watched in (one, other):
                watched.call(what, size, 0, 0)
            assert one.answers == other.answers
            one.answers.clear()
            other.answers.clear()
        assert one.heap.segments() == other.heap.segments()


rows = st.tuples(
    st.one_of(sizes, st.just(0)), st.integers(-1, 60), st.integers(0, 70), st.sampled_from([0, 0, 7]),
    st.sampled_from([0, 0, 1]),
)  # fmt: skip


@limits(max_examples=100, deadline=None)
@given(configurations, capacities, st.lists(rows, max_size=60), st.lists(st.integers(0, 60), max_size=3))
def test_a_recorded_program_reserves_as_much(
    configuration: AllocatorSettings, capacity: int | None, table: list[tuple[int, ...]], flushed: list[int]
) -> None:
    columns = np.array(table, np.int64).reshape(-1, 5).T
    requested, born, life, stream, pool = columns
    address = np.arange(len(born), dtype=np.int64) * 512
    program = Program(requested, address, born, born + 1 + life, stream, pool, np.array(flushed, np.int64), 61)
    answers: list[Any] = []
    for within in (native.reserved_within, replay.reserved_within):
        try:
            answers.append(within(program, configuration, capacity))
        except AllocatorOutOfMemory as error:
            answers.append((error.requested, error.free))
    assert answers[0] == answers[1]


def test_what_c_does_not_know_is_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = (
        AllocatorSettings(max_split_size=MIB),
        AllocatorSettings(large_segment_size=MIB),
        AllocatorSettings(roundup_divisions=(1 << 40,) * 16),
        AllocatorSettings(max_split_size=1 << 70),
    )
    for settings, capacity in [*((one, None) for one in odd), (AllocatorSettings(), 1 << 60)]:
        assert type(native.allocator(settings, capacity)) is CachingAllocator
    monkeypatch.setenv("MEMPROF_NATIVE", "0")
    assert replayer() is None
    assert type(native.allocator(AllocatorSettings())) is CachingAllocator


def test_blocks_outlive_their_model_and_models_die() -> None:
    heap = native.allocator(AllocatorSettings())
    heap.on_event = heap.free  # type: ignore[assignment]  # a circle
    heap.tells_blocks, heap.on_event = False, lambda *_, heap=heap: None
    kept = [heap.block_at(heap.malloc(size)[0]) for size in (512, 3 * MIB)]
    other, gone = native.allocator(AllocatorSettings()), weakref.ref(heap)
    del heap
    gc.collect()
    assert gone() is None
    assert [block.size for block in kept] == [512, 3 * MIB]
    assert kept[0].pool.free == []
    with pytest.raises(UsageError, match="no block in use"):
        other.drop(kept[0])


def test_operations_that_cannot_be_are_refused() -> None:
    heap = native.allocator(AllocatorSettings())
    home, own = heap.pool_of(512), [None, None]
    for operations, error in (
        ([(0, 2, 0)], IndexError), ([(0, 0, 1)], IndexError), ([(1, 0, -1)], TypeError), ([(0, 0)], TypeError),
        ([(0, 0, "a")], TypeError), ([(1, 7, 0)], IndexError),
    ):  # fmt: skip
        with pytest.raises(error):
            heap.run(operations, [home], [512], [512], own, own)  # type: ignore[list-item,arg-type]
    block = heap.acquire(home, 512, 400)
    heap.drop(block)
    with pytest.raises(UsageError, match="no block in use"):
        heap.run([(1, 0, -1)], [home], [512], [400], [block], [])


_SANITIZED = """
import sys
from pathlib import Path
import pytest
from benchmarks.reading.fuzz_scan import install
install("replay", Path(sys.argv[1]))
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not heavy", sys.argv[2]]))
"""


@pytest.mark.heavy
def test_under_sanitizers(tmp_path: Path) -> None:
    """The tests of this file, with the extension built under AddressSanitizer and UBSan."""
    module = tmp_path / "replay.so"
    try:
        environment = sanitized(ROOT / "memprof" / "_native" / "replay.c", module)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no compiler with sanitizers: {error}")
    command = [sys.executable, "-c", _SANITIZED, str(module), __file__]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


def _acquired(heap: CachingAllocator) -> Any:
    return heap.block_at(heap.malloc(5 * MIB)[0])


def _frees_at_alloc(heap: CachingAllocator, _: Any) -> None:
    def event(action: str, address: int, *_: int) -> None:
        if action == "alloc":
            heap.free(address)
            heap.empty_cache()

    heap.on_event = event
    heap.malloc(5 * MIB)


def _drops_twice(heap: CachingAllocator, _: Any) -> None:
    block = _acquired(heap)

    def event(action: str, *_: int) -> None:
        if action == "free_requested":
            heap.on_event = None
            heap.drop(block)
            heap.empty_cache()

    heap.on_event = event
    heap.drop(block)


def _drops_a_freed_one(heap: CachingAllocator, _: Any) -> None:
    block = _acquired(heap)

    def event(action: str, *_: int) -> None:
        if action == "free_completed":
            heap.on_event = None
            heap.drop(block)

    heap.on_event = event
    heap.free(block.address)


def _takes_from_another(heap: CachingAllocator, other: CachingAllocator) -> None:
    other.free(other.malloc(512)[0])
    heap.acquire(other.pool_of(512), 512, 512)


def _clears_while_read(heap: CachingAllocator, _: Any) -> None:
    operations: list[list[Any]] = []

    class Kind:
        def __index__(self) -> int:
            operations.clear()
            return 0

    operations += [[Kind(), 0, 0]]
    heap.run(operations, [heap.pool_of(512)], [512], [512], [None], [])


_MISUSES = (_frees_at_alloc, _drops_twice, _drops_a_freed_one, _takes_from_another, _clears_while_read)


def _misused() -> None:
    for misuse in _MISUSES:
        heap, other = (native.allocator(AllocatorSettings()) for _ in range(2))
        with contextlib.suppress(UsageError, KeyError, TypeError):
            misuse(heap, other)
        heap.on_event = None
        for _ in range(3):
            heap.free(heap.malloc(5 * MIB)[0])
        heap.empty_cache()


def test_misused_it_refuses_and_goes_on() -> None:
    """In a process of its own: each of these wrote to freed memory."""
    command = [sys.executable, "-c", "from tests.allocator.test_native import _misused; _misused(); print('done')"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_settings_that_only_python_knows_are_left_to_it() -> None:
    class Own(AllocatorSettings):
        def round_size(self, size: int) -> int:
            return super().round_size(size) + 512

    assert type(native.allocator(Own())) is CachingAllocator
    assert type(native.allocator(AllocatorSettings(), 1e9)) is CachingAllocator  # type: ignore[arg-type]
    heap = native.allocator(AllocatorSettings())
    assert "NativeAllocator" in repr(heap)
    assert heap != native.allocator(AllocatorSettings())
