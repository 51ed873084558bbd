"""Count the host memory a simulated run would use: pinned buffers, managed state, the processes themselves.

Fake tensors all say ``cpu``, so those that a real run keeps in pinned host memory are told apart by how they are made
(``pin_memory=True``) or where (:meth:`memprof.simulate.recorder.storages.Storages.on_host`), and are never the
device's.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

# Resident memory of a training process beside the model: interpreter, torch, transformers and CUDA's libraries and
# host-side context. An estimate, like the device's context: a process that only imported them here measured 0.6 GiB
# without CUDA. Measure yours.
PROCESS_BYTES = 3 * 2**30


class HostPool:
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


def host_use(raw: dict[str, Any], processes: int) -> dict[str, int]:
    """Return the host bytes of a simulated run's process, and what all ``processes`` of a node need.

    ``process_bytes`` is an estimate (:data:`PROCESS_BYTES`) and what the process holds in ordinary memory.
    """
    host = raw["memprof"]["host"]
    pinned, managed = host["pinned_bytes"], host["managed_bytes"]
    own = max(0, (host["rss_bytes"] or 0) - pinned - managed)
    return {
        "pinned_bytes": pinned,
        "managed_bytes": managed,
        "process_bytes": own,
        "processes": processes,
        "needed_bytes": processes * (pinned + managed + own),
    }
