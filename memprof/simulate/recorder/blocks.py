"""Take blocks of the allocator's model and give them back, with the stack and tag of what asks for them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memprof.allocator.model import AllocatorOutOfMemory, CachingAllocator
from memprof.foreign import RawRecord
from memprof.recording.recorder import AllocationTags
from memprof.recording.trace.module_scope import ModuleScope
from memprof.recording.trace.snapshot_format import StorageBirth, _TagWriter
from memprof.recording.trace.training_regions import Region
from memprof.simulate.recorder.decode_log import REHEARSED, Rehearsal
from memprof.simulate.recorder.owners import FakeOwnerBook
from memprof.simulate.recorder.plain_heap import PlainHeap
from memprof.simulate.recorder.round_log import RoundLog
from memprof.simulate.recorder.trace import AllocatorTrace
from memprof.vocabulary import Category


class Windows:
    """Keep the highest allocated, reserved, active and requested bytes of each window; windows nest."""

    def __init__(self, heap: CachingAllocator | PlainHeap) -> None:
        self._heap = heap
        self._open: list[list[int]] = []

    def open(self) -> None:
        self._open.append(self._now())

    def close(self) -> list[int]:
        """Close the innermost window and return its highest values."""
        highest = self._open.pop()
        self.widen(*highest)
        return highest

    def widen(self, *highest: int) -> None:
        """Count highest values in the innermost window; without any, what is held now."""
        if self._open:
            self._open[-1] = list(map(max, self._open[-1], highest or self._now()))

    def _now(self) -> list[int]:
        heap = self._heap
        return [heap.allocated, heap.reserved, heap.active, heap.requested]


class SimulatedBlocks:
    """Take and give back blocks.

    While ``rehearsal`` is set, what is asked for is logged there and not taken; ``round`` logs what is taken.
    ``stream_of`` says on which stream blocks are taken, ``oom`` how the device was found full.
    """

    def __init__(self, heap: CachingAllocator | PlainHeap, capture: Callable[[], Any] | None) -> None:
        self.trace, self.windows = AllocatorTrace(heap), Windows(heap)
        self.scope, self.region, self.tags = ModuleScope(), Region(), AllocationTags()
        self.owners: FakeOwnerBook | None = None
        self.stream_of: Callable[[], int] = int
        self.rehearsal: Rehearsal | None = None
        self.round: RoundLog | None = None
        self.oom: RawRecord | None = None
        self._heap, self._capture = heap, capture
        self._writer = _TagWriter()

    def make(self, nbytes: int, shape: tuple[int, ...], dtype: torch.dtype, func: Any) -> int:
        """Take memory for a tensor that ``func`` makes now and return its address."""
        captured = self._capture() if self._capture is not None else None
        running = self.scope.innermost
        region = self.region.now(self.tags.phase, running is not None)
        born = StorageBirth(0, 0, nbytes, None, self.tags, region, running, shape, dtype, func)
        stream = self.stream_of()
        if self.rehearsal is not None:
            return self.rehearsal.take(born, stream, captured)
        return self.take(nbytes, stream, captured, self._writer.write(born))

    def make_bytes(self, nbytes: int, func: Any = None) -> int:
        """Take memory that no tensor stands for and return its address."""
        return self.make(nbytes, (nbytes,), torch.uint8, func)

    def take(self, nbytes: int, stream: int, captured: Any, tag: str) -> int:
        """Take memory for this stack and under this tag, and return its address.

        Raises:
            OutOfMemory: the simulated device is full.
        """
        self.trace.asks(captured, tag)
        try:
            address, _ = self._heap.malloc(nbytes, stream)
        except AllocatorOutOfMemory as error:
            self.note_oom(error, captured)
            raise
        self.trace.took(address, captured, tag)
        self.windows.widen()
        if self.round is not None:
            self.round.born(address, nbytes, stream, captured, tag)
        return address

    def release(self, address: int) -> None:
        if address >= REHEARSED:
            if self.rehearsal is not None:
                self.rehearsal.give(address)
            return
        if self.rehearsal is not None:
            self.rehearsal.usable = False  # of something that was there before
        self.trace.gives(address)
        self._heap.free(address)
        if self.round is not None:
            self.round.freed(address)

    def scratch(self, sizes: list[int], func: Any = None) -> None:
        """Take memory of these sizes together and give it back at once."""
        for address in [self.make_bytes(nbytes, func) for nbytes in sizes if nbytes]:
            self.release(address)

    def hold(self, nbytes: int, category: Category, name: str, detail: str | None = None) -> int:
        """Take memory that no tensor stands for (workspaces, engine pools) and return its address; it stays."""
        address = self.make_bytes(nbytes)
        self.claim(address, category, detail, name)
        return address

    def claim(self, address: int, category: Category, detail: str | None, name: str | None) -> None:
        """Claim a block, where owners are kept."""
        if self.owners is not None:
            self.owners.claim_address(address, category, detail, name)

    def tag_of(self, born: StorageBirth) -> str:
        """Return the tag of an allocation made under the current tags."""
        return self._writer.write(born._replace(tags=self.tags))

    def note_oom(self, error: AllocatorOutOfMemory, captured: Any) -> None:
        """Note that the simulated device is full."""
        self.oom = {
            "requested_bytes": error.requested,
            "device_free_bytes": error.free,
            "captured": captured,
            "time_us": self.trace.now,
        }

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[Rehearsal]:
        """Log what runs while open, unseen by the device. What is allocated while open must be freed by its end."""
        assert self.rehearsal is None
        self.rehearsal = Rehearsal()
        try:
            yield self.rehearsal
            if self.rehearsal.alive:  # in circles of references
                gc.collect()
        finally:
            self.rehearsal = None

    def beyond_device(self) -> None:
        """Mark the logs: host memory is allocated or freed, which none of them repeats."""
        if self.round is not None:
            self.round.only_device = False
        if self.rehearsal is not None:
            self.rehearsal.usable = False
