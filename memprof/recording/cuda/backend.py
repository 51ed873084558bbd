"""Call the few functions of torch that the CUDA history needs.

Some have grown arguments from torch 2.2 to 2.13; ``can_*`` says what an older torch lacks.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from memprof.compat import torch as names
from memprof.compat.patching import Patches
from memprof.foreign import Args, Kwargs
from memprof.recording.cuda.ring import AllocationCount
from memprof.recording.frames import compiler_not_imported
from memprof.recording.recorder import RawSnapshot, Segment

# What this process's torch tells of failed allocations: it takes observers and never gives them back.
_observers: set[Callable[[int, int, int, int], None]] = set()
# The functions that reset torch's peak counters, wrapped while anybody watches them: recordings may overlap, and end in
# any order.
_peak_resets = Patches()
_reset_watchers: list[object] = []


@dataclass(eq=False)
class _Limit:
    """Hold the memory fractions before and after a recording has limited the process."""

    before: float
    set_here: float


# By device, the first that was set first.
_limits: defaultdict[int, list[_Limit]] = defaultdict(list)


#: Counters of the allocator by name, pool and kind; counts that have no pool are plain numbers.
Counted = Mapping[str, Any]


class TorchCuda:
    """Call the installed torch, whose functions are looked up once; sizes in bytes."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._record = names.HISTORY.get()
        self._snapshot = names.SNAPSHOT.get()
        self._set_tag, self._get_tag = names.TAG.find(), names.CURRENT_TAG.find()
        self._accepted = set(inspect.signature(self._record).parameters)
        snapshot_options = inspect.signature(torch.cuda.memory_snapshot).parameters
        self.can_skip = "skip_actions" in self._accepted and "include_traces" in snapshot_options
        self.can_tag = bool(self._set_tag and self._get_tag)

    @property
    def allocator(self) -> object:
        """Identify the allocator, which has one history for everybody."""
        return self._torch

    def history_enabled(self) -> bool:
        return bool(names.HISTORY_ENABLED.get()())

    def record(self, context: str | None, stacks: str, max_entries: int, skip: list[str], clear: bool) -> None:
        """Turn the history on: ``context`` says for which events stacks are kept, ``skip`` which events are left out;
        ``stacks`` is ``"python"``, or ``"all"`` with C++ frames."""
        arguments: Kwargs = {"context": context, "stacks": stacks, "max_entries": max_entries}
        if skip:
            arguments["skip_actions"] = skip
        if clear and "clear_history" in self._accepted:
            arguments["clear_history"] = True
        if "global_record_annotations" in self._accepted:
            arguments["global_record_annotations"] = True
        self._record("all", **arguments)

    def stop(self) -> None:
        self._record(None)

    def watch_switches(self, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
        """Put ``around(function)`` in the place of what every way to switch the history calls, memprof's own included;
        return what undoes it. A function that the program has imported before is on the way too."""
        patches = Patches()
        for switch in (names.HISTORY_SWITCH, names.OLD_HISTORY_SWITCH):
            if function := switch.find():
                patches.put(*switch.place(), around(function))
        return patches.restore

    @staticmethod
    def skipped_by(arguments: Args, named: Kwargs) -> list[str]:
        """Return the kinds of events that a switch leaves out from then on, given what its function is called with."""
        given = [*arguments, *named.values()]  # the only list that either function takes
        return next(([str(one) for one in value] for value in given if isinstance(value, list)), [])

    def watch_resets(self, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
        """Put ``around(function)``, the same whoever watches, in the place of what every way to reset the peak counters
        calls; return what ends this watch."""
        if not _reset_watchers:
            for reset in (names.PEAK_RESET, names.OTHER_PEAK_RESET):
                if function := reset.find():
                    _peak_resets.put(*reset.place(), around(function))
        _reset_watchers.append(watcher := object())

        def end() -> None:
            if watcher in _reset_watchers:
                _reset_watchers.remove(watcher)
            if not _reset_watchers:
                _peak_resets.restore()

        return end

    def snapshot(self) -> RawSnapshot:
        with compiler_not_imported():
            return cast(RawSnapshot, dict(self._snapshot()))

    def segments(self) -> list[Segment]:
        """Return the allocator's state, on a torch that can without the history: cheap."""
        without = {"include_traces": False} if self.can_skip else {}
        return list(self._torch.cuda.memory_snapshot(**without))  # type: ignore[no-untyped-call]

    def stats(self, device: int) -> Counted:
        """Return the allocator's counters: name, pool, then ``current``, ``peak``, ``allocated`` or ``freed``."""
        return dict(self._torch.cuda.memory_stats_as_nested_dict(device))

    def counts(self) -> dict[int, AllocationCount]:
        """Return by device what the allocator has counted."""
        found = {}
        for device in range(self._torch.cuda.device_count()):
            counted = self.stats(device).get("allocation", {}).get("all", {})
            found[device] = AllocationCount(*(counted.get(name, 0) for name in ("allocated", "freed", "current")))
        return found

    def reset_peaks(self, device: int) -> None:
        self._torch.cuda.reset_peak_memory_stats(device)

    def tag(self, text: str) -> None:
        if self.can_tag:
            self._set_tag(text)

    def current_tag(self) -> str:
        return str(self._get_tag()) if self.can_tag else ""

    def watch_oom(self, observer: Callable[[int, int, int, int], None]) -> None:
        """Call ``observer`` for every allocation that fails; attach it once, however often this is called."""
        attach = names.OOM_OBSERVER.find()
        if attach and observer not in _observers:
            _observers.add(observer)
            attach(observer)  # the recorder's, which is guarded

    def limit(self, device: int, nbytes: int) -> Callable[[], None] | None:
        """Limit what this process may reserve of a device to ``nbytes``; return what restores the limit of before.

        None, and nothing is limited, on a torch that cannot report the limit of before.
        """
        cuda = self._torch.cuda
        get, put = getattr(cuda, "get_per_process_memory_fraction", None), cuda.set_per_process_memory_fraction
        if get is None:
            return None
        before, fraction = float(get(device)), min(1.0, nbytes / self.total_bytes(device))
        put(min(before, fraction), device)
        limits = _limits[device]
        limits.append(limit := _Limit(before, float(get(device))))

        def restore() -> None:
            at = limits.index(limit)
            limits.remove(limit)
            if at < len(limits):  # another recording has set its own on top, and goes on
                if limits[at].before == limit.set_here:
                    limits[at].before = limit.before
            elif get(device) == limit.set_here:  # else the program has set another one meanwhile
                put(limit.before, device)

        return restore

    def total_bytes(self, device: int) -> int:
        return int(self._torch.cuda.get_device_properties(device).total_memory)
