"""Give out memory without an allocator, to simulate what runs on the CPU."""

from __future__ import annotations

from collections.abc import Callable

from memprof.allocator.model import Pool, segment_record
from memprof.allocator.settings import AllocatorSettings
from memprof.foreign import RawRecord


class PlainHeap:
    """Give every storage exactly the bytes it asks for, at an address of its own."""

    def __init__(self) -> None:
        self.on_event: Callable[[str, int, int, int, int], None] | None = None
        self.settings = AllocatorSettings()
        self.reserved = self.allocated = 0
        self._next = 0x10_0000_0000
        self._live: dict[int, int] = {}

    @property
    def active(self) -> int:
        return self.allocated

    requested = active

    def malloc(self, size: int, stream: int = 0, pool: int = 0) -> tuple[int, int]:
        address, self._next = self._next, self._next + -(-max(size, 1) // 64) * 64
        self._live[address] = size
        self.allocated += size
        if self.on_event is not None:
            self.on_event("alloc", address, size, 0, 0)
        return address, size

    def free(self, address: int) -> None:
        size = self._live.pop(address)
        self.allocated -= size
        if self.on_event is not None:
            self.on_event("free_requested", address, size, 0, 0)
            self.on_event("free_completed", address, size, 0, 0)

    def segments(self) -> list[RawRecord]:
        """List each storage as a segment of its own, as a tensor trace has it."""
        home = Pool(0, 0, False)
        return [segment_record([(address, size, size, False)], home, False) for address, size in self._live.items()]
