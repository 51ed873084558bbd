"""CUDA's own memory history as a recorder: a bounded ring with Python stacks, peaks from the allocator's counters.

What is done here beside switching torch's history on:

* every allocation is tagged with phase and step where torch can do that (2.10 and later);
* a phase's peaks are the allocator's own, by resetting its peak counters at phase boundaries (an option);
* steady decoding, which would push everything else out of the ring, is thinned: after the first tokens only some
  are recorded, at growing distances, and what changed meanwhile is written in at the end of each gap, so that
  totals are exact outside the gaps;
* what the program, or another recording, resets of these counters is read before;
* a user's own history is left as it is: it is read, never restarted, cleared or stopped. So is memprof's from when the
  program switches it. What a history lost is judged by its own events (:mod:`memprof.recording.cuda.ring`);
* recordings that overlap share one history, which ends with the last of them.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from memprof.emulate.notes import emulation_notes, uncomputed_notes
from memprof.foreign import Args, Kwargs
from memprof.recording.cuda.backend import Counted, TorchCuda
from memprof.recording.cuda.copying import copied
from memprof.recording.cuda.history_gaps import BLOCK_EVENTS, Gap, block_changes
from memprof.recording.cuda.ring import AllocationCount, HistoryEvidence, Judged, blocks_in_use, judge
from memprof.recording.frames import StackWriter, capture_function, stack_lines
from memprof.recording.guard import FailureGuard
from memprof.recording.recorder import (
    AllocationTags,
    DeviceInfo,
    FailedRequest,
    RawSnapshot,
    Recorded,
    Segment,
    Trace,
    WindowPeaks,
)
from memprof.vocabulary import Kind, Phase

DEFAULT_ENTRIES = 1_000_000
_TAG = "memprof:"
# Decode tokens recorded before thinning begins, and how much longer each further gap is than the tokens so far.
_FIRST_TOKENS = 8
_GROWTH = 1.1
_STATS = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")

_NO_LIMIT = (
    "capacity was not applied: this torch cannot report the process's memory fraction, which memprof would have to "
    "restore at the end (torch.cuda.get_per_process_memory_fraction)"
)

_ONE_LIMITED = "capacity was applied to device {} alone; the program has also used device {}"
_SWITCHED = (
    "the program called torch.cuda.memory._record_memory_history while memprof recorded: the history has been the "
    "program's since then, as it was switched, and memprof does not stop it"
)
_SHARED = (
    "two recordings of memprof were on at once and share torch's memory history: its size and its stacks are those "
    "that the first asked for, and steady decoding is not thinned"
)
_LEFT_OUT = (
    "the program left events out of the memory history by skip_actions while memprof recorded, {:.1f} s in all: what "
    "came and went in such a gap is not recorded, and what it changed is written at its end"
)
_INCOMPLETE = (
    "the memory history that the program had switched on before memprof began lost events, as when it is full, is "
    "switched again or leaves events out by skip_actions"
)
_DISTURBED = (
    "the memory history lost events although it was not full, as when the program stops, clears or shortens it while "
    "memprof records"
)

# torch keeps observers for ever: one is attached a process (TorchCuda sees to it), and tells whoever records.
_recording: weakref.WeakSet[CudaHistory] = weakref.WeakSet()


class _GapBegin(NamedTuple):
    """Hold the time at which a gap began, and the allocator's segments and counts then."""

    time_us: int
    segments: list[Segment]
    counts: dict[int, AllocationCount]


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
        self.guard = FailureGuard()
        self.notes: list[str] = emulation_notes()
        self._renewed: list[str] = []  # notes of the last dump, which the next one replaces
        self.on_oom: Callable[[], None] | None = None
        self.on_switch: Callable[[], None] | None = None  # when the program is about to switch the history
        self.index = device.index or 0
        self._backend: TorchCuda = TorchCuda() if backend is None else backend
        self._entries = max_entries or DEFAULT_ENTRIES
        self._context = None if stacks is None else "all"
        self._stacks = stacks or "python"
        self._capture = capture_function(stacks)
        self._reset_peaks = reset_peaks
        self._capacity = capacity
        self._thin = thin and self._backend.can_skip
        self._foreign = False  # whether the history is the program's
        self._is_switching = False  # whether memprof itself switches it now
        self._is_resetting = False  # whether this recording resets the peak counters now
        self._unwatch: list[Callable[[], None]] = []
        self._tagging = False
        self._tags = AllocationTags()
        self._windows: list[dict[str, int]] = []
        self._gaps: list[Gap] = []
        self._gap_begin: _GapBegin | None = None
        self._decoded = 0
        self._next_token = _FIRST_TOKENS + 2
        self._start_us = self._stop_us = 0
        self._in_use: dict[int, set[int]] = {}  # addresses by device, when recording began
        self._counts: dict[int, AllocationCount] = {}  # by device, then
        self._skipped: Counter[int] = Counter()  # allocations in gaps, by device
        self._unlimit: Callable[[], None] | None = None
        self._final: tuple[RawSnapshot, Recorded] | None = None
        self._oom: FailedRequest | None = None

    # -- life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to record, also anew after :meth:`stop`."""
        self._start_us, self._stop_us, self._final, self._unlimit = self.now_us(), 0, None, None
        for of_before in (self._unwatch, self._windows, self._gaps, self._skipped):
            of_before.clear()
        self._in_use = blocks_in_use(self._backend.segments())
        is_on, sharing = self._backend.history_enabled(), self._sharing()
        self._foreign = is_on and not sharing
        if self._foreign:
            self._thin = False
            self.notes.append("the memory history was already on when memprof began; it was read and left as it was")
        elif is_on:
            first = sharing[0]
            self._entries, self._context, self._stacks = first._entries, first._context, first._stacks
            for one in (*sharing, self):
                one._share()
        else:
            self._switch([], clear=True)
        self._unwatch.append(
            self._backend.watch_switches(lambda switch: self.guard.around(switch, self._switching, self._switched))
        )
        self._counts = self._backend.counts()
        if self._capacity is not None:
            self._unlimit = self._backend.limit(self.index, self._capacity)
            if self._unlimit is None:
                self.notes.append(_NO_LIMIT)
        self._tagging = self._backend.can_tag and not self._backend.current_tag()
        _recording.add(self)
        self._backend.watch_oom(_told_oom)
        self._unwatch.append(self._backend.watch_resets(lambda reset: _resets.around(reset, _tell_reset)))

    def stop(self) -> None:
        if self._stop_us:
            return
        try:
            self._divide_gap()
            # Stopping torch's history also clears it: what it holds is taken first, and every later dump is a copy.
            counts, raw = self._backend.counts(), self._backend.snapshot()
            self._stop_us = self.now_us()
            self._final = (raw, self._filled(raw, counts))
        finally:
            self._stop_us = self._stop_us or self.now_us()
            self._leave()

    def _leave(self) -> None:
        """Put back what was changed of torch."""
        _recording.discard(self)
        for unwatch in self._unwatch:
            unwatch()
        if self._unlimit is not None:
            self._unlimit()
        if self._tagging and self._has_own_tag():
            self._backend.tag("")
        if not self._foreign and not self._sharing():
            self._backend.stop()

    def _sharing(self) -> list[CudaHistory]:
        """Return the other recordings for which memprof has switched the same history on."""
        mine = self._backend.allocator
        others = [one for one in _recording if one is not self and not one._foreign and one._backend.allocator is mine]
        return sorted(others, key=lambda one: one._start_us)

    def _share(self) -> None:
        self._resume()
        self._thin = False
        if _SHARED not in self.notes:
            self.notes.append(_SHARED)

    def _switch(self, skip: list[str], clear: bool = False) -> None:
        self._is_switching = True
        try:
            self._backend.record(self._context if not skip else None, self._stacks, self._entries, skip, clear)
        finally:
            self._is_switching = False

    def _switching(self, args: Args, kwargs: Kwargs) -> list[str] | None:
        """Leave the history to the program, which is about to switch it; return the kinds of events it leaves out, None
        if it is memprof that switches."""
        if self._is_switching or self._stop_us:
            return None
        if self._foreign:
            self._end_gap()
        elif self.on_switch is not None:
            self.on_switch()
        else:
            self._resume()
            self._foreign, self._thin = True, False
            self.notes.append(_SWITCHED)
        return [kind for kind in self._backend.skipped_by(args, kwargs) if kind in BLOCK_EVENTS]

    def _switched(self, skipped: list[str] | None, _result: Any, error: BaseException | None) -> None:
        """Begin a gap if the program leaves events out from now on."""
        if skipped and error is None and not self._stop_us:
            self._begin_gap()

    def now_us(self) -> int:
        return time.time_ns() // 1000

    def watches(self, device_type: str) -> bool:
        return device_type == "cuda"

    def set_tags(self, tags: AllocationTags) -> None:
        if tags.phase != Phase.GENERATE.value:
            self._decoded, self._next_token = 0, _FIRST_TOKENS + 2
            self._resume()
        self._tags = tags
        self._tag_thread(_tag_text(tags))

    def untag(self) -> None:
        """Remove this thread's tag: it has no phase open, and nobody removes the tag later, from another thread."""
        self._tag_thread("")

    def _tag_thread(self, text: str) -> None:
        if self._tagging and self._has_own_tag():
            self._backend.tag("" if self._stop_us else text)

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

    def oom(self) -> FailedRequest | None:
        return self._oom

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
        sure = [peaks[name] if self._reset_peaks or peaks[name] > peaks[f"{name} before"] else None for name in _STATS]
        allocated, reserved, active, requested = sure
        ends = (_of(stats, name, "current") for name in ("allocated_bytes", "reserved_bytes"))
        return WindowPeaks(allocated, reserved, active, requested, *ends)

    def _current(self) -> dict[str, int]:
        stats = self._backend.stats(self.index)
        now = {name: _of(stats, name, "current") for name in _STATS}
        # Without resetting, only a peak above the one there was before can be told.
        before = {f"{name} before": 0 if self._reset_peaks else _of(stats, name, "peak") for name in _STATS}
        return {**now, **before}

    def _fold(self) -> Counted:
        """Add the peaks since the last boundary to the innermost window, and reset the counters."""
        stats = self._backend.stats(self.index)
        self._raise_peaks(stats)
        if self._reset_peaks:
            self._is_resetting = True
            try:
                self._backend.reset_peaks(self.index)
            finally:
                self._is_resetting = False
        return stats

    def _raise_peaks(self, stats: Counted) -> None:
        """Raise the innermost window's peaks to the counters'."""
        if self._windows:
            window = self._windows[-1]
            for name in _STATS:
                window[name] = max(window[name], _of(stats, name, "peak"))

    def peaks_are_reset(self, device: int | None) -> None:
        """Read the peak counters of a device (None: of any), which the program or another recording is about to
        reset."""
        if device in (self.index, None) and not self._is_resetting:
            self._raise_peaks(self._backend.stats(self.index))

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
        if not self._thin or self._stop_us or self._tags.phase != Phase.GENERATE.value:
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
            self._begin_gap()
            self._switch(BLOCK_EVENTS)

    def _begin_gap(self) -> None:
        self._gap_begin = _GapBegin(self.now_us(), self._backend.segments(), self._backend.counts())

    def _resume(self) -> None:
        """End a gap of memprof's own; the program's lasts until the program ends it."""
        if self._gap_begin is not None and not self._foreign:
            self._end_gap()
            self._switch([])

    def _end_gap(self) -> None:
        if self._gap_begin is None:
            return
        begin, before, counted = self._gap_begin
        self._gap_begin = None
        counts, segments, none = self._backend.counts(), self._backend.segments(), AllocationCount()
        self._gaps.append(Gap(begin, self.now_us(), block_changes(before, segments), self._foreign))
        self._skipped.update({device: now.since(counted.get(device, none)) for device, now in counts.items()})

    def _divide_gap(self) -> None:
        """End the gap in what is written now; the program's goes on after it."""
        self._resume()
        if self._gap_begin is not None:
            self._end_gap()
            self._begin_gap()

    def _gap_notes(self) -> list[str]:
        left_out = sum(gap.end_us - gap.begin_us for gap in self._gaps if gap.is_programs)
        return [_LEFT_OUT.format(left_out / 1e6)] if left_out else []

    def _limit_notes(self, recorded: Recorded) -> list[str]:
        used = ", ".join(str(one.index) for one in recorded.others)
        return [_ONE_LIMITED.format(self.index, used)] if used and self._unlimit is not None else []

    # -- writing -----------------------------------------------------------------------------------------------

    def dump(self) -> tuple[RawSnapshot, Recorded]:
        if self._final is not None:
            raw, recorded = self._final
            raw = copied(raw)
        else:
            self._divide_gap()
            counts, raw = self._backend.counts(), self._backend.snapshot()
            recorded = self._filled(raw, counts)
        now = [*uncomputed_notes(), *self._gap_notes(), *self._limit_notes(recorded)]
        self.notes[:] = [*(note for note in self.notes if note not in self._renewed), *now]
        self._renewed = now
        return raw, recorded

    def _filled(self, raw: RawSnapshot, counts: dict[int, AllocationCount]) -> Recorded:
        """Take the holes out of a snapshot's traces and fill their gaps; return how complete each device's is."""
        traces: list[Trace] = raw.setdefault("device_traces", [])
        in_use, stop_us = blocks_in_use(raw.get("segments") or []), self._stop_us or self.now_us()
        entries, none = None if self._foreign else self._entries, AllocationCount()
        judged: dict[int, Judged] = {}
        for device in sorted({self.index, *range(len(traces)), *in_use, *self._in_use, *counts}):
            allocations = counts.get(device, none).since(self._counts.get(device, none)) - self._skipped[device]
            before, after = self._in_use.get(device, set()), in_use.get(device, set())
            trace = traces[device] if device < len(traces) else []
            if device == self.index or trace or before or after or allocations > 0:
                known = HistoryEvidence(device, self._start_us, stop_us, before, after, allocations, entries)
                judged[device] = judge(trace, self._gaps, known)
            if device < len(traces) and device in judged:
                traces[device] = judged[device].trace
        disturbed = _INCOMPLETE if self._foreign else _DISTURBED
        is_known = disturbed in self.notes or _SWITCHED in self.notes
        if not is_known and any(one.is_disturbed for one in judged.values()):
            self.notes.append(disturbed)
        own = judged.pop(self.index)
        thinned, others = [[gap.begin_us, gap.end_us] for gap in own.gaps], [one.history for one in judged.values()]
        recorded = Recorded(own.history.start_us, stop_us, own.history.history.value, 0, entries, thinned, others)
        self._gaps = [gap for gap in self._gaps if gap.end_us >= recorded.earliest_us]
        return recorded

    def failed(self, device: int, requested: int, allowed: int, device_free: int) -> None:
        """Record a failed allocation, before the allocator raises; runs on the thread that asked for memory.

        ``device`` is one of several that the model may lie on; ``allowed`` what this process may reserve where torch
        has a limit for it, else the device's memory; ``device_free`` the bytes that the driver has free.
        """
        total = self._backend.total_bytes(device)
        frames = StackWriter().write([self._capture() if self._capture else None])[0]
        limit = allowed if 0 < allowed < total else None
        self._oom = FailedRequest(requested, device_free, stack_lines(frames), self.now_us(), device, limit)
        if self.on_oom is not None:
            self.on_oom()


def _tell_oom(device: int, requested: int, allowed: int, device_free: int) -> None:
    for recorder in list(_recording):
        recorder.guard.hook(recorder.failed)(device, requested, allowed, device_free)


def _tell_reset(arguments: Args, _named: Kwargs) -> None:
    device = arguments[0] if arguments and isinstance(arguments[0], int) else None
    for recorder in list(_recording):
        recorder.guard.hook(recorder.peaks_are_reset)(device)


_resets = FailureGuard(lost="the peaks of phases in which the program resets torch's counters")
_told_oom = FailureGuard(lost="what allocations failed").hook(_tell_oom)


def _of(stats: Counted, name: str, which: str) -> int:
    return int(stats.get(name, {}).get("all", {}).get(which, 0))


def _tag_text(tags: AllocationTags) -> str:
    pairs = [("phase", tags.phase), ("step", tags.step), ("role", tags.role)]
    if tags.phase == Phase.OPTIMIZER_STEP.value:
        pairs.append(("region", "optimizer"))
    return _TAG + ";".join(f"{k}={v}" for k, v in pairs if v is not None)
