"""Count the host memory a simulated run would use: pinned buffers, managed state, the processes themselves.

Fake tensors all say ``cpu``, so those that a real run keeps in pinned host memory are told apart by how they are made
(``pin_memory=True``) or where (:meth:`memprof.simulate.recorder.storages.Storages.on_host`), and are never the
device's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from memprof.report.base import known
from memprof.snapshot.recorded_run import HostMemory

# Resident memory of a training process beside the model: interpreter, torch, transformers and CUDA's libraries and
# host-side context. An estimate, like the device's context: a process that only imported them here measured 0.6 GiB
# without CUDA. Measure yours.
PROCESS_BYTES = 3 * 2**30


class PinnedHostAllocator:
    """Model torch's caching allocator of pinned memory: powers of two, kept for reuse, never given back.

    Rules: ``aten/src/ATen/core/CachingHostAllocator.h``. Sizes are bytes. ``held`` is what the host has lost to it,
    ``requested_peak`` the highest sum of what was asked for.
    """

    def __init__(self) -> None:
        self.requested = self.requested_peak = self.held = 0
        self._free: Counter[int] = Counter()

    def malloc(self, nbytes: int) -> None:
        """Take a buffer of at least ``nbytes``."""
        size = _power(nbytes)
        if self._free[size]:
            self._free[size] -= 1
        else:
            self.held += size
        self.requested += nbytes
        self.requested_peak = max(self.requested_peak, self.requested)

    def free(self, nbytes: int) -> None:
        """Give back the buffer that ``nbytes`` were asked for with."""
        self._free[_power(nbytes)] += 1
        self.requested -= nbytes


def _power(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length() if nbytes > 1 else 1


@dataclass(frozen=True)
class HostUse:
    """State the host bytes of a simulated run's process, and what all ``processes`` of a node need.

    ``process_bytes`` is an estimate (:data:`PROCESS_BYTES`) and what the process holds in ordinary memory.
    """

    pinned_bytes: int
    managed_bytes: int
    process_bytes: int
    processes: int

    @property
    def needed_bytes(self) -> int:
        return self.processes * (self.pinned_bytes + self.managed_bytes + self.process_bytes)


def host_use(host: HostMemory | None, processes: int) -> HostUse:
    """Sum up the host memory of a simulated run, as its snapshot has it."""
    host = host or HostMemory()
    pinned, managed = known(host.pinned_bytes) or 0, known(host.managed_bytes) or 0
    return HostUse(pinned, managed, max(0, (known(host.rss_bytes) or 0) - pinned - managed), processes)
