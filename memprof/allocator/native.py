"""Run the allocator's model in C where that was built: the same blocks, events and totals as the Python model's.

What C does not know is left to Python: an extension that is switched off or was not built, and settings that no
``PYTORCH_CUDA_ALLOC_CONF`` makes.
"""

from __future__ import annotations

import contextlib
from functools import cache
from types import ModuleType
from typing import NoReturn

import numpy as np

from memprof import _native
from memprof.allocator import replay
from memprof.allocator.addresses import refuse
from memprof.allocator.model import CachingAllocator
from memprof.allocator.replay import Program
from memprof.allocator.settings import AllocatorSettings

_LARGEST = 1 << 60  # bytes of one request; no device has as many


def allocator(settings: AllocatorSettings, capacity: int | None = None) -> CachingAllocator:
    """Return the model of a device's allocator, as :class:`CachingAllocator` makes it."""
    module = _native.replayer()
    if module is not None and type(settings) is AllocatorSettings:
        with contextlib.suppress(ValueError, OverflowError, TypeError):
            return _class_of(module)(settings, capacity)
    return CachingAllocator(settings, capacity)


def reserved_within(program: Program, settings: AllocatorSettings, capacity: int | None) -> int:
    """Return what :func:`memprof.allocator.replay.reserved_within` does, and raise what it does."""
    heap = allocator(settings, capacity)
    if type(heap) is CachingAllocator or program.requested.max(initial=0) > _LARGEST:
        return replay.reserved_within(program, settings, capacity)
    columns = (*replay.in_order(program), program.requested, program.stream, program.pool)
    heap.replay(*(np.ascontiguousarray(column, np.int64) for column in columns))  # type: ignore[attr-defined]
    return heap.max_reserved


@cache
def _class_of(module: ModuleType) -> type[CachingAllocator]:
    def no_addresses(self: CachingAllocator, size: int, page: int) -> NoReturn:
        """Refuse a segment: of ``size`` bytes, or in whole pages for a request of so many."""
        refuse(-(-self.settings.round_size(size) // page) * page if page else size)

    bases = (module.Heap, CachingAllocator)
    return type("NativeAllocator", bases, {"_no_addresses": no_addresses, "__module__": __name__})
