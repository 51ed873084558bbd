"""CUDA's own memory history as a recorder: a bounded ring with Python stacks, peaks from the allocator's counters.

What is done here beside switching torch's history on:

* every allocation is tagged with phase and step where torch can do that (2.10 and later);
* a phase's peaks are the allocator's own, by resetting its peak counters at phase boundaries (an option);
* steady decoding, which would push everything else out of the ring, is thinned: after the first tokens only some
  are recorded, at growing distances, and what changed meanwhile is written in at the end of each gap, so that
  totals are exact outside the gaps;
* a user's own history is left as it is: it is read, never restarted, cleared or stopped, and what it lost is judged by
  its own events (:mod:`memprof.recording.cuda.ring`).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from memprof.emulate.notes import emulation_notes, uncomputed_notes
from memprof.recording.cuda.backend import TorchCuda
from memprof.recording.cuda.history_gaps import Gap, block_changes, fill_gaps
from memprof.recording.cuda.ring import blocks_in_use, copied, history_of
from memprof.recording.frames import StackWriter, capture_function
from memprof.recording.guard import Door
from memprof.recording.recorder import DeviceHistory, DeviceInfo, Recorded, Tags, WindowPeaks
from memprof.vocabulary import Kind, Phase

DEFAULT_ENTRIES = 1_000_000
_TAG = "memprof:"
_SKIPPED = ["alloc", "free_requested", "free_completed"]
# Decode tokens recorded before thinning begins, and how much longer each further gap is than the tokens so far.
_FIRST_TOKENS = 8
_GROWTH = 1.1
_STATS = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")

_NO_LIMIT = (
    "capacity was not applied: this torch cannot report the process's memory fraction, which memprof would have to "
    "restore at the end (torch.cuda.get_per_process_memory_fraction)"
)

# torch keeps observers for ever: one is attached a process (TorchCuda sees to it), and tells whoever records.
_recording: weakref.WeakSet[CudaHistory] = weakref.WeakSet()


class CudaHistory:
    """A recorder for one CUDA or ROCm device, with its index.

    Args:
        max_entries: entries the ring keeps (a million by default; about 1 KB each with stacks).
        reset_peaks: let the allocator's peak counters be reset at phase boundaries. Without it a phase's peak is
            known only where it raised the run's peak.
        thin: thin steady decoding.
        capacity: bytes this process may reserve while recording; torch's own limit for the process is set to it.
        backend: torch, or a stand-in with the methods of :class:`TorchCuda`.
    """

    kind = Kind.CUDA
    bounded = True

    def __init__(
        self,
        device: torch.device,
        *,
        max_entries: int | None = None,
        stacks: str | None = "python",
        reset_peaks: bool = True,
        thin: bool = True,
        capacity: int | None = None,
        backend: Any = None,
    ) -> None:
        self.door = Door()
        self.notes: list[str] = emulation_notes()
        self._uncomputed: list[str] = []
        self.on_oom: Callable[[], None] | None = None
        self.index = device.index or 0
        self._backend: TorchCuda = TorchCuda() if backend is None else backend
        self._entries = max_entries or DEFAULT_ENTRIES
        self._context = None if stacks is None else "all"
        self._stacks = stacks or "python"
        self._capture = capture_function(stacks)
        self._reset_peaks = reset_peaks
        self._capacity = capacity
        self._thin = thin and self._backend.can_skip
        self._foreign = False
        self._tagging = False
        self._tags = Tags()
        self._windows: list[dict[str, int]] = []
        self._gaps: list[Gap] = []
        self._gap_begin: tuple[int, list[dict[str, Any]]] | None = None
        self._decoded = 0
        self._next_token = _FIRST_TOKENS + 2
        self._start_us = self._stop_us = 0
        self._in_use: dict[int, set[int]] = {}  # addresses by device, when recording began
        self._made: dict[int, int] = {}  # allocations counted then by device, for a history that was on already
        self._unlimit: Callable[[], None] | None = None
        self._final: tuple[dict[str, Any], Recorded] | None = None
        self._oom: dict[str, Any] | None = None

    # -- life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._start_us = self.now_us()
        self._in_use = blocks_in_use(segments := self._backend.segments())
        self._foreign = self._backend.history_enabled()
        if self._foreign:
            self._thin = False
            devices = {self.index, *(segment.get("device", 0) for segment in segments)}
            self._made = {device: self._allocations(device) for device in devices}
            self.notes.append("the memory history was already on when memprof began; it was read and left as it was")
        else:
            self._backend.record(self._context, self._stacks, self._entries, [], True)
        if self._capacity is not None:
            self._unlimit = self._backend.limit(self.index, self._capacity)
            if self._unlimit is None:
                self.notes.append(_NO_LIMIT)
        self._tagging = self._backend.can_tag and not self._backend.current_tag()
        _recording.add(self)
        self._backend.watch_oom(_told_oom)

    def stop(self) -> None:
        if self._stop_us:
            return
        self._resume()
        # Stopping torch's history also clears it: what it holds is taken first, and every later dump is a copy of that.
        raw = self._backend.snapshot()
        self._stop_us = self.now_us()
        self._final = (raw, self._filled(raw))
        _recording.discard(self)
        if self._unlimit is not None:
            self._unlimit()
        if self._tagging and self._has_own_tag():
            self._backend.tag("")
        if not self._foreign:
            self._backend.stop()

    def now_us(self) -> int:
        return time.time_ns() // 1000

    def watches(self, device_type: str) -> bool:
        return device_type == "cuda"

    def set_tags(self, tags: Tags) -> None:
        if tags.phase != Phase.GENERATE.value:
            self._decoded, self._next_token = 0, _FIRST_TOKENS + 2
            self._resume()
        if tags != self._tags:
            self._tags = tags
            if self._tagging and self._has_own_tag():
                self._backend.tag(_tag_text(tags))

    def _has_own_tag(self) -> bool:
        """Tell whether this thread's tag is memprof's or none: the program may have set its own meanwhile."""
        current = self._backend.current_tag()
        return not current or current.startswith(_TAG)

    def device(self) -> DeviceInfo:
        return self.other_device(self.index)

    def other_device(self, index: int) -> DeviceInfo:
        """Describe a device; a model may lie on several, and the history covers all."""
        from memprof.recording.system.host import device_name, device_total

        return DeviceInfo(index, "cuda", device_name("cuda", index), device_total("cuda", index))

    def oom(self) -> dict[str, Any] | None:
        return None if self._oom is None else dict(self._oom)

    def forget_oom(self) -> None:
        self._oom = None

    # -- peaks -------------------------------------------------------------------------------------------------

    def open_window(self) -> None:
        self._fold()
        self._windows.append(self._current())

    def close_window(self) -> WindowPeaks:
        stats = self._fold()
        peaks = self._windows.pop()
        for window in self._windows[-1:]:
            for name in _STATS:
                window[name] = max(window[name], peaks[name])
        sure: dict[str, Any] = {}
        for name in _STATS:
            known = self._reset_peaks or peaks[name] > peaks[f"{name} before"]
            sure[name.replace("bytes", "peak")] = peaks[name] if known else None
        allocated, reserved = (_of(stats, name, "current") for name in ("allocated_bytes", "reserved_bytes"))
        return WindowPeaks(**sure, allocated_end=allocated, reserved_end=reserved)

    def _current(self) -> dict[str, int]:
        stats = self._backend.stats(self.index)
        now = {name: _of(stats, name, "current") for name in _STATS}
        # Without resetting, only a peak above the one there was before can be told.
        before = {f"{name} before": 0 if self._reset_peaks else _of(stats, name, "peak") for name in _STATS}
        return {**now, **before}

    def _fold(self) -> dict[str, Any]:
        """Add the peaks since the last boundary to the innermost window, and reset the counters."""
        stats = self._backend.stats(self.index)
        if self._windows:
            window = self._windows[-1]
            for name in _STATS:
                window[name] = max(window[name], _of(stats, name, "peak"))
        if self._reset_peaks:
            self._backend.reset_peaks(self.index)
        return stats

    def state(self) -> dict[str, int]:
        """Return the allocator's bytes; ``cached``: whole free segments, ``inactive_split``: free parts of others."""
        stats = self._backend.stats(self.index)
        allocated, reserved = _of(stats, "allocated_bytes", "current"), _of(stats, "reserved_bytes", "current")
        split = _of(stats, "inactive_split_bytes", "current")
        cached = max(0, reserved - _of(stats, "active_bytes", "current") - split)
        return {"allocated": allocated, "reserved": reserved, "inactive_split": split, "cached": cached}

    # -- thinning ----------------------------------------------------------------------------------------------

    def on_token(self, new_tokens: int) -> bool:
        """Tell whether to record the forward that begins; ``new_tokens`` is 1 in decoding, more in a prefill."""
        if not self._thin or self._tags.phase != Phase.GENERATE.value:
            return True
        if new_tokens > 1:
            self._decoded, self._next_token = 0, _FIRST_TOKENS + 2
            self._resume()
            return True
        self._decoded += 1
        if self._decoded <= _FIRST_TOKENS:
            return True
        if self._decoded < self._next_token:
            self._suspend()
            return False
        self._next_token = max(self._decoded + 2, int(self._decoded * _GROWTH))
        self._resume()
        return True

    def _suspend(self) -> None:
        if self._gap_begin is None:
            self._gap_begin = (self.now_us(), self._backend.segments())
            self._backend.record(None, self._stacks, self._entries, _SKIPPED, False)

    def _resume(self) -> None:
        if self._gap_begin is None:
            return
        begin, before = self._gap_begin
        self._gap_begin = None
        self._backend.record(self._context, self._stacks, self._entries, [], False)
        end = self.now_us()
        self._gaps.append(Gap(begin, end, block_changes(before, self._backend.segments())))

    # -- writing -----------------------------------------------------------------------------------------------

    def dump(self) -> tuple[dict[str, Any], Recorded]:
        self.notes[:] = [*(n for n in self.notes if n not in self._uncomputed), *(now := uncomputed_notes())]
        self._uncomputed = now
        if self._final is not None:
            raw, recorded = self._final
            return copied(raw), recorded
        self._resume()
        raw = self._backend.snapshot()
        return raw, self._filled(raw)

    def _filled(self, raw: dict[str, Any]) -> Recorded:
        """Write the gaps into a snapshot's traces; return how complete each device's trace is."""
        traces = raw.get("device_traces") or []
        own = self._history(raw, self.index)
        others = [self._history(raw, d) for d, trace in enumerate(traces) if trace and d != self.index]
        stop_us = self._stop_us or self.now_us()
        recorded = Recorded(own.start_us, stop_us, own.history.value, 0, self._entries, [], tuple(others))
        self._gaps = [gap for gap in self._gaps if gap.end_us >= recorded.earliest_us]
        for one in (own, *others):
            gaps = [gap for gap in self._gaps if gap.end_us >= one.start_us]
            if one.index < len(traces):
                traces[one.index] = fill_gaps(traces[one.index], gaps, one.index)
            if one is own:
                recorded.thinned.extend([gap.begin_us, gap.end_us] for gap in gaps)
        return recorded

    def _history(self, raw: dict[str, Any], device: int) -> DeviceHistory:
        """Return how much of a device's history its trace holds."""
        return history_of(
            raw,
            device,
            start_us=self._start_us,
            in_use=self._in_use.get(device, set()),
            max_entries=None if self._foreign else self._entries,
            made=self._allocations(device) - self._made[device] if device in self._made else 0,
        )

    def _allocations(self, device: int) -> int:
        """Return how many allocations torch has counted on a device."""
        return _of(self._backend.stats(device), "allocation", "allocated")

    def failed(self, device: int, requested: int, allowed: int, device_free: int) -> None:
        """Record a failed allocation, before the allocator raises; runs on the thread that asked for memory.

        ``device`` is one of several that the model may lie on; ``allowed`` what this process may reserve where torch
        has a limit for it, else the device's memory; ``device_free`` the bytes that the driver has free.
        """
        total = self._backend.total_bytes(device)
        frames = StackWriter().write([self._capture() if self._capture else None])[0]
        self._oom = {
            "requested_bytes": requested,
            "device_free_bytes": device_free,
            "device": device,
            "limit_bytes": allowed if 0 < allowed < total else None,
            "stack": [f"{f['filename']}:{f['line']} {f['name']}" for f in frames],
            "time_us": self.now_us(),
        }
        if self.on_oom is not None:
            self.on_oom()


def _tell_oom(device: int, requested: int, allowed: int, device_free: int) -> None:
    for recorder in list(_recording):
        recorder.door.hook(recorder.failed)(device, requested, allowed, device_free)


_told_oom = Door(lost="what allocations failed").hook(_tell_oom)


def _of(stats: dict[str, Any], name: str, which: str) -> int:
    return int(stats.get(name, {}).get("all", {}).get(which, 0))


def _tag_text(tags: Tags) -> str:
    pairs = [("phase", tags.phase), ("step", tags.step), ("role", tags.role)]
    if tags.phase == Phase.OPTIMIZER_STEP.value:
        pairs.append(("region", "optimizer"))
    return _TAG + ";".join(f"{k}={v}" for k, v in pairs if v is not None)
