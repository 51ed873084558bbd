"""Find what stays on the device when an engine sleeps: torch still counts pages that were given back.

vLLM's sleep mode unmaps the physical pages behind its pool and keeps the addresses; torch's counters do not change
(28,294 MB before and after 23.7 GB had been given back, as reported). The engine's own allocator knows what it holds.
"""

from __future__ import annotations

import sys
from typing import Any

from memprof.compat.optional_packages import ENGINE_POOL
from memprof.vocabulary import Phase

# Phases at whose end the device is looked at: those between rollout and training.
SWITCHES = {Phase.SLEEP.value, Phase.WAKE.value, Phase.WEIGHT_SYNC.value}


class Residency:
    """Follow an engine as it sleeps, wakes and receives weights.

    After a sleep all of the engine's pool is unmapped; after a wake what is still backed up on the host is (a wake of
    some tags only brings back a part). Engines in other processes are seen by the driver alone.
    """

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self.notes: list[str] = []
        self._asleep = False

    def note(
        self, now_us: int, phase: str, step: int | None, state: dict[str, int], used: int | None, own: int | None = None
    ) -> None:
        """Record device memory after an engine sleeps, wakes or receives weights.

        ``state`` has the allocator's ``allocated`` and ``reserved``, where there is one; ``used`` is what all processes
        hold of the device, ``own`` this one's share, where the driver tells. That is less than torch counts as reserved
        only where pages were given back (torch_memory_saver keeps no figures of its own).
        """
        if phase != Phase.WEIGHT_SYNC.value:
            self._asleep = phase == Phase.SLEEP.value
        allocated, reserved = state.get("allocated"), state.get("reserved")
        unmapped = self.unmapped_bytes()
        if own is not None and reserved is not None:
            unmapped = max(unmapped, reserved - own)
        self.rows.append([now_us, phase, step, allocated, reserved, unmapped, used])
        del self.rows[:-20_000]

    def unmapped_bytes(self) -> int:
        """Return bytes torch counts whose pages the engine in this process has given back."""
        module = sys.modules.get(ENGINE_POOL.module)
        if module is None:
            return 0
        try:
            pool = ENGINE_POOL.of(module).instance
            held = list(pool.pointer_to_data.values()) if pool is not None else []
            return sum(int(d.handle[1]) for d in held if self._asleep or d.cpu_backup_tensor is not None)
        except Exception as error:  # another release's pool: its names are not declared, vLLM is rarely installed here
            self.notes[:] = [f"What vLLM's sleeping engine gave back is not known: its pool has changed ({error!r})."]
            return 0
