"""Small snapshots in torch's format, written event by event with sizes chosen by the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Raw = dict[str, Any]


def frame(function: str, file: str = "train.py", line: int = 1) -> Raw:
    """One stack frame as torch writes it."""
    return {"filename": file, "line": line, "name": function}


class SnapshotBuilder:
    """Events in, torch's dict out. Blocks are rounded up to 512 bytes; each lives in its own segment."""

    def __init__(self, device: int = 0, n_devices: int = 1, start_us: int = 1_000_000) -> None:
        self.device, self.n_devices = device, n_devices
        self.events: list[Raw] = []
        self.live: dict[int, Raw] = {}
        self.segments: dict[int, int] = {}
        self.time_us = start_us
        self._next = 0x7F00_0000_0000

    def _event(self, action: str, addr: int, size: int, frames: list[Raw], metadata: str = "") -> None:
        self.time_us += 10
        self.events.append(
            {
                "action": action,
                "addr": addr,
                "size": size,
                "stream": 0,
                "time_us": self.time_us,
                "frames": frames,
                "user_metadata": metadata,
            }
        )

    def ghost(self, size: int) -> int:
        """A block that was there before recording began; its address."""
        return self._block(size, [])

    def _block(self, size: int, frames: list[Raw]) -> int:
        address, block = self._next, -(-size // 512) * 512
        self._next += -(-block // 2**21) * 2**21
        self.segments[address] = -(-block // 2**21) * 2**21
        self.live[address] = {"size": block, "requested_size": size, "frames": frames}
        return address

    def alloc(self, size: int, *functions: str, metadata: str = "") -> int:
        """Allocate ``size`` bytes with a stack of these functions, innermost first; its address."""
        frames = [frame(name) for name in functions]
        address = self._block(size, frames)
        self._event("segment_alloc", address, self.segments[address], frames)
        self._event("alloc", address, size, frames, metadata)
        return address

    def free(self, address: int, pending: bool = False) -> None:
        """Free a block; ``pending`` leaves out ``free_completed`` (see :meth:`complete`)."""
        size = self.live[address]["requested_size"]
        self._event("free_requested", address, size, [])
        if not pending:
            self.complete(address)

    def complete(self, address: int) -> None:
        """Complete a pending free."""
        self._event("free_completed", address, self.live.pop(address)["requested_size"], [])

    def raw(self, extra: Raw | None = None) -> Raw:
        """The snapshot as torch's ``_snapshot()`` would return it."""
        segments = [self._segment(address, total) for address, total in sorted(self.segments.items())]
        traces: list[list[Raw]] = [[] for _ in range(self.n_devices)]
        traces[self.device] = self.events
        raw: Raw = {"segments": segments, "device_traces": traces, "allocator_settings": {}, "external_annotations": []}
        if extra is not None:
            raw["memprof"] = extra
        return raw

    def _segment(self, address: int, total: int) -> Raw:
        live = self.live.get(address)
        used = live["size"] if live else 0
        blocks = []
        if live:
            blocks.append({"address": address, "state": "active_allocated", **live})
        if total - used:
            rest = {"address": address + used, "size": total - used, "requested_size": 0, "state": "inactive"}
            blocks.append({**rest, "frames": []})
        return {
            "device": self.device,
            "address": address,
            "total_size": total,
            "allocated_size": used,
            "active_size": used,
            "requested_size": live["requested_size"] if live else 0,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }

    def save(self, path: Path, extra: Raw | None = None) -> Path:
        """Write the pickle with the standard library alone, as torch does."""
        import pickle

        path.write_bytes(pickle.dumps(self.raw(extra), protocol=4))
        return path
