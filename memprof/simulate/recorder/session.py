"""Record a simulated run: phases and owners as in a real session, no facts about this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from memprof.allocator.model import CachingAllocator
from memprof.foreign import SnapshotFile
from memprof.recording.guard import NULL_GUARD
from memprof.recording.kv_caches import CacheWatch
from memprof.recording.session import Session
from memprof.report.codec import to_builtins
from memprof.report.simulation import GenerationNeed
from memprof.simulate.recorder.host_memory import PROCESS_BYTES
from memprof.simulate.recorder.owners import FakeOwnerBook
from memprof.simulate.recorder.recorder import FakeRecorder


class FakeSession(Session):
    """Work as :class:`memprof.recording.session.Session`, but raise mistakes: there is no run to protect.

    ``growth``: repeat every decoding step of a generation and run every micro-batch, not only the first ones and the
    last.

    ``generation`` is what :meth:`generating` noted. ``non_torch``, ``managed_bytes`` (paged state) and ``host_bytes``
    (weights kept in ordinary host memory) are set by what is simulated.
    """

    def __init__(self, recorder: FakeRecorder, config: Mapping[str, Any], *, world_size: int = 1) -> None:
        super().__init__(recorder, config=config, rank=0, world_size=world_size, guard=NULL_GUARD)
        self.identity = None  # a simulation is no run
        self.fake_recorder = recorder
        storages, blocks = recorder.storages, recorder.blocks
        self.owners = self.book = FakeOwnerBook(recorder.now_us, storages.address_of, lambda: blocks.rehearsal)
        blocks.owners = self.book
        self.caches = CacheWatch(self.owners)
        self.managed_bytes = self.host_bytes = 0
        self.non_torch: int | None = None
        self.generation: GenerationNeed | None = None
        self.growth = True

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """Record the highest held and reserved bytes while open, and how often memory is given back to go on."""
        heap = self.fake_recorder.allocator
        flushes = heap.flushes if isinstance(heap, CachingAllocator) else 0
        self.fake_recorder.open_window()
        try:
            yield
        finally:
            highest = self.fake_recorder.close_window()
            if isinstance(heap, CachingAllocator):
                before = self.generation or GenerationNeed()
                self.generation = GenerationNeed(
                    held_bytes=max(before.held_bytes, highest.allocated_peak or 0),
                    reserved_bytes=max(before.reserved_bytes, highest.reserved_peak or 0),
                    flushes=max(before.flushes, heap.flushes - flushes),
                    expandable=heap.settings.expandable_segments,
                )

    def _ask_holders(self) -> None:
        """Look for no holders: fake storages have no addresses, and the simulation's own objects would be found."""

    def _sample(self) -> None:
        """Sample nothing: this process's memory says nothing about the run's."""

    def _rss(self) -> int:
        return PROCESS_BYTES + self.fake_recorder.storages.host.held + self.managed_bytes + self.host_bytes

    def to_raw(self) -> SnapshotFile:
        raw = super().to_raw()
        pinned = self.fake_recorder.storages.host
        raw["memprof"]["host"] = {
            "pinned_bytes": pinned.held,
            "pinned_requested_bytes": pinned.requested_peak,
            "managed_bytes": self.managed_bytes,
            "rss_bytes": self._rss() if self.fake_recorder.cuda else None,
        }
        heap = self.fake_recorder.allocator
        if isinstance(heap, CachingAllocator):
            raw["memprof"]["highest"] = {"allocated_bytes": heap.max_allocated, "reserved_bytes": heap.max_reserved}
        if self.generation is not None:
            raw["memprof"]["generation"] = to_builtins(self.generation)
        raw["memprof"]["non_torch_bytes"] = self.non_torch
        raw["memprof"]["overhead"] = {"seconds_in_memprof": 0.0, "bytes_of_history": 0}
        return raw
