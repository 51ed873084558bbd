"""The allocator's own highest figures, whoever resets its peak counters meanwhile."""

from __future__ import annotations

from typing import Any

import torch

COUNTED = ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes")


class Ledger:
    """Keep the highest value of each counter across resets; ``read`` is the peak since ``restart``.

    memprof resets the counters at phase boundaries, which a test must see through: what stood in them is noted first.
    """

    def __init__(self, device: int = 0) -> None:
        torch.cuda.init()
        self._device = device
        self._highest = dict.fromkeys(COUNTED, 0)
        self._reset = torch.cuda.reset_peak_memory_stats
        torch.cuda.reset_peak_memory_stats = self._noting

    def restart(self) -> None:
        """Begin to count from what is held now."""
        self._reset(self._device)
        self._highest = dict.fromkeys(COUNTED, 0)

    def read(self) -> dict[str, int]:
        """Return the highest figures so far, by their names in ``torch.cuda.memory_stats``, and how often it failed."""
        self._note()
        stats = torch.cuda.memory_stats(self._device)
        return {**self._highest, "ooms": stats.get("num_ooms", 0), "retries": stats.get("num_alloc_retries", 0)}

    def _noting(self, device: Any = None) -> None:
        if (
            device is None
            or torch.device(device if isinstance(device, str) else f"cuda:{device}").index == self._device
        ):
            self._note()
        self._reset(device)

    def _note(self) -> None:
        stats = torch.cuda.memory_stats(self._device)
        for name in COUNTED:
            self._highest[name] = max(self._highest[name], stats.get(f"{name}.all.peak", 0))
