"""An allocator that answers memprof's calls as CUDA's does, for machines without a GPU."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch

from memprof.compat.patching import Patches
from memprof.recording.cuda.history import CudaHistory
from memprof.recording.cuda.ring import AllocationCount
from memprof.recording.session import Session


class Allocator:
    """Blocks of 512 bytes and up in one endless segment; history, counters and tags as torch keeps them."""

    can_skip = True
    can_tag = True

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.live: dict[int, tuple[int, int, list[Any]]] = {}
        self.waiting: dict[int, tuple[int, int, list[Any]]] = {}
        self.next = 0x7F0000000000
        self.ring: list[dict[str, Any]] = []
        self.oldest = 0  # where in the ring the next event goes once it is full
        self.recording: dict[str, Any] | None = None
        self.peak = self.current = 0
        self.made = self.freed = 0  # counts that a program may reset
        self.text = ""
        self.calls: list[str] = []
        self.observers = 0
        self.watching_resets = 0
        self.observer: Callable[[int, int, int, int], None] | None = None

    # what a program does

    def malloc(self, nbytes: int) -> int:
        address, self.next = self.next, self.next + -(-nbytes // 512) * 512
        frames = [{"name": "f", "filename": "train.py", "line": 1}] if (self.recording or {}).get("context") else []
        self.live[address] = (nbytes, self.next - address, frames)
        self.made += 1
        self.current += self.next - address
        self.peak = max(self.peak, self.current)
        self._entry("alloc", address, nbytes, frames)
        return address

    def free(self, address: int, pending: bool = False) -> None:
        """Free a block; ``pending`` leaves it waiting for a stream (see :meth:`complete`)."""
        nbytes, block, frames = self.live.pop(address)
        self.freed += 1
        self.current -= block
        self._entry("free_requested", address, nbytes, [])
        if pending:
            self.waiting[address] = (nbytes, block, frames)
        else:
            self._entry("free_completed", address, nbytes, [])

    def complete(self, address: int) -> None:
        """Let the stream be done with a block."""
        nbytes, _, _ = self.waiting.pop(address)
        self._entry("free_completed", address, nbytes, [])

    def reset_counts(self) -> None:
        self.made = self.freed = 0

    def _entry(self, action: str, address: int, nbytes: int, frames: list[Any]) -> None:
        if self.recording is None or action in self.recording["skip"]:
            return
        self.insert(
            {"action": action, "addr": address, "size": nbytes, "stream": 0, "time_us": time.time_ns() // 1000,
             "user_metadata": self.text, "frames": frames}
        )  # fmt: skip
        time.sleep(2e-6)

    def insert(self, entry: dict[str, Any]) -> None:
        """Add an event as torch's ring does, whose size may have been changed meanwhile."""
        assert self.recording is not None
        if len(self.ring) < self.recording["max_entries"]:
            self.ring.append(entry)
            return
        self.ring[self.oldest] = entry
        self.oldest = (self.oldest + 1) if self.oldest + 1 < self.recording["max_entries"] else 0

    @property
    def trace(self) -> list[dict[str, Any]]:
        return self.ring[self.oldest :] + self.ring[: self.oldest]

    def clear(self) -> None:
        self.ring, self.oldest = [], 0

    # what memprof asks of torch

    def history_enabled(self) -> bool:
        return self.recording is not None

    def record(self, context: str | None, stacks: str, max_entries: int, skip: list[str], clear: bool) -> None:
        self.calls.append("clear" if clear else "thin" if skip else "record")
        self.recording = {"context": context, "stacks": stacks, "max_entries": max_entries, "skip": skip}
        if clear:
            self.clear()

    def stop(self) -> None:
        self.calls.append("stop")
        self.recording = None
        self.clear()  # as torch does

    def watch_switches(self, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
        patches = Patches()
        for name in ("record", "stop"):
            patches.put(self, name, around(getattr(self, name)))
        return patches.restore

    @property
    def allocator(self) -> object:
        return self

    @staticmethod
    def skipped_by(arguments: tuple[Any, ...], _named: dict[str, Any]) -> list[str]:
        return list(arguments[3]) if len(arguments) > 3 else []

    def watch_resets(self, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
        """Wrap the counters' reset as torch's is wrapped: once, until the last who watches it has ended."""
        if not self.watching_resets:
            vars(self)["reset_peaks"] = around(self.reset_peaks)
        self.watching_resets += 1

        def end() -> None:
            self.watching_resets -= 1
            if not self.watching_resets:
                vars(self).pop("reset_peaks")

        return end

    def counts(self) -> dict[int, AllocationCount]:
        return {self.index: AllocationCount(self.made, self.freed, len(self.live))}

    def snapshot(self) -> dict[str, Any]:
        traces: list[list[dict[str, Any]]] = [[] for _ in range(self.index + 1)]
        traces[self.index] = self.trace
        return copy.deepcopy({"segments": self.segments(), "device_traces": traces, "allocator_settings": {}})

    def segments(self) -> list[dict[str, Any]]:
        start = 0x7F0000000000
        blocks, at = [], start
        for address, (nbytes, block, frames) in sorted({**self.live, **self.waiting}.items()):
            if address > at:
                blocks.append({"address": at, "size": address - at, "requested_size": 0, "state": "inactive"})
            state = "active_pending_free" if address in self.waiting else "active_allocated"
            blocks.append({"address": address, "size": block, "requested_size": nbytes, "state": state,
                           "frames": frames})  # fmt: skip
            at = address + block
        size = max(2**21, self.next - start)
        if at < start + size:
            blocks.append({"address": at, "size": start + size - at, "requested_size": 0, "state": "inactive"})
        return [{"device": self.index, "address": start, "total_size": size, "allocated_size": self.current,
                 "active_size": self.current, "requested_size": sum(b[0] for b in self.live.values()), "stream": 0,
                 "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
                 "blocks": blocks}]  # fmt: skip

    def stats(self, device: int) -> dict[str, Any]:
        assert device == self.index
        one = {"current": self.current, "peak": self.peak}
        requested = {"current": sum(b[0] for b in self.live.values()), "peak": 0}
        reserved = {"current": 2**21, "peak": 2**21}
        return {"allocated_bytes": {"all": one}, "active_bytes": {"all": one}, "reserved_bytes": {"all": reserved},
                "requested_bytes": {"all": requested}}  # fmt: skip

    def reset_peaks(self, device: int) -> None:
        self.calls.append("reset")
        self.peak = self.current

    def tag(self, text: str) -> None:
        self.text = text

    def current_tag(self) -> str:
        return self.text

    def watch_oom(self, observer: Callable[[int, int, int, int], None]) -> None:
        self.observers += self.observer is not observer
        self.observer = observer

    def limit(self, device: int, nbytes: int) -> Callable[[], None]:
        assert device == self.index
        self.calls.append(f"limit {nbytes}")
        return lambda: self.calls.append("limit as before")

    def total_bytes(self, device: int) -> int:
        return 24 * 10**9


def started_session(allocator: Allocator, **options: Any) -> Session:
    """Start a session that records this allocator."""
    session = Session(CudaHistory(torch.device("cuda", 0), backend=allocator, **options))
    session.start()
    return session
