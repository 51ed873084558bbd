"""The tensor trace: every tensor storage's birth and death on one device, seen by a dispatch mode.

Works where there is no caching allocator to ask (a CPU, other accelerators). Sizes are the storages' own, so
allocated, active and requested bytes are one and the same, and nothing is known about reserved memory. What
kernels allocate for themselves and give back before they return is not seen.

The mode neither computes nor draws random numbers: an operation runs as it would without it.
"""

from __future__ import annotations

import gc
import re
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from memprof.compat.patching import Patches
from memprof.compat.torch import OPERATOR_SCHEMA, STORAGE_RESIZE
from memprof.foreign import Args, Kwargs
from memprof.recording.frames import StackWriter, capture_function, stack_lines
from memprof.recording.guard import FailureGuard, mark_user_error
from memprof.recording.recorder import AllocationTags, DeviceInfo, FailedRequest, RawSnapshot, Recorded, WindowPeaks
from memprof.recording.storages import gradient_of, is_tensor, is_tensor_type, of_types, storage_key, storage_of
from memprof.recording.trace.clock import Clock
from memprof.recording.trace.dispatch_mode import (
    PLAIN,
    STRIDED,
    Watching,
    dtype_of,
    keep_compiler_off,
    layout_of,
    remove_mode,
    shape_of,
    storage_in_operation,
    tensors_in,
)
from memprof.recording.trace.module_scope import ModuleScope
from memprof.recording.trace.snapshot_format import Died, Held, StorageBirth, write_snapshot
from memprof.recording.trace.training_regions import Region
from memprof.recording.trace.worker_threads import WorkerThreads
from memprof.units import format_bytes as size
from memprof.vocabulary import History, Kind

_CPU_OOM = re.compile(r"(?:tried to allocate|can't allocate memory: you tried to allocate) (\d+) bytes")
_FROZEN = (
    "gc.freeze() was called: tensors made before it that only local variables hold are counted from their first use, "
    "or not at all"
)
_NAMED = 3
_EARLIER = (
    "Threads were running before the recording began ({}), whose operations are not recorded: what came and went on "
    "them is not counted"
)
_UNSEEN = (
    " were allocated by what memprof does not record (torch.frombuffer, UntypedStorage, or a thread of before the "
    "recording): they are counted from the recording's beginning, and what was freed is not counted"
)


class _Watch(weakref.ref):  # type: ignore[type-arg]
    """Refer weakly to a storage, and remember which it was."""

    __slots__ = ("address", "key", "nbytes")
    key: int
    address: int
    nbytes: int


class _Failed(NamedTuple):
    """Hold a failed allocation, its stack not yet written."""

    requested_bytes: int
    device_free_bytes: int | None
    captured: Any
    time_us: int


class TensorTrace:
    """Record tensors on any device of torch's.

    Args:
        max_entries: the newest entries that are kept (torch counts an allocation as one entry and a free as two).
        capacity: bytes the device is to have: what needs more ends in ``torch.OutOfMemoryError``, as it would there.
        hidden: folders whose frames are left out of stacks.
    """

    kind = Kind.TRACE

    def __init__(
        self,
        device: torch.device,
        *,
        max_entries: int | None = None,
        stacks: str | None = "python",
        capacity: int | None = None,
        hidden: Iterable[str] = (),
    ) -> None:
        self.scope = ModuleScope()
        self.guard = FailureGuard()
        self.notes: list[str] = []
        self.on_oom: Callable[[], None] | None = None
        # Distributed runs number their CPUs; tensors there do not.
        self._device = torch.device("cpu") if device.type == "cpu" else device
        self._capacity = capacity
        self._max_entries = max_entries
        self.bounded = max_entries is not None
        self._hidden = tuple(hidden)
        self._clock = Clock()
        # An allocation and its free are two records here and three entries in torch's format.
        self._records: deque[StorageBirth | Died] = deque(
            maxlen=None if max_entries is None else max(2, max_entries * 2 // 3)
        )
        self._count = 0
        self._live: dict[int, _Watch] = {}
        self._mutable: dict[Any, bool] = {}
        self._capture = capture_function(stacks)
        self._tags = AllocationTags()
        self._region = Region()
        self._allocated = 0
        self._peaks: list[int] = []
        self._mode: Watching | None = None
        self._patches = Patches()
        self._threads = WorkerThreads(self.guard, lambda: Watching(self) if self.is_watching else None)
        self._making = threading.RLock()  # deaths are counted inside it, on the thread that has it
        self._is_partial = False  # whether blocks or threads have no history here
        self._unseen = 0  # bytes
        self._start_us = self._stop_us = 0
        self._held_at_stop: list[Held] | None = None
        self._oom: _Failed | None = None

    # -- life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Record every live tensor as older than the recording, then watch operations."""
        self._start_us = self._clock.tick()
        self._on_death = self.guard.hook(self._died)
        keep_compiler_off(self._on_death.__code__)
        for storage in _visible_storages():
            self._adopt(storage)
        if _is_collector_frozen():
            self.notes.append(_FROZEN)
        self.scope.start(self.guard)
        self._region.start(self.guard)
        self._watch_resize()
        self._threads.start()
        self._mode = Watching(self)
        self._mode.__enter__()

    def stop(self) -> None:
        """Stop watching; the deaths of what is alive now no longer matter."""
        if self._mode is None:
            return
        mode, self._mode = self._mode, None
        self._threads.stop()
        trouble = None
        if mode.is_elsewhere:  # a generator that another thread closes
            mode.leave_later()
        else:
            trouble = remove_mode(mode)
        self._note_unseen(self._adopt_unseen())
        self.scope.stop()
        self._region.stop()
        self._patches.restore()
        self._stop_us = self._clock.tick()
        self._held_at_stop = self._held()
        self._live = {}
        if trouble:
            warnings.warn(f"memprof: {trouble}.", RuntimeWarning, stacklevel=3)
            self.notes.append(trouble)

    @property
    def is_watching(self) -> bool:
        """Whether operations are recorded now, on whatever thread."""
        return self._mode is not None

    def _adopt_unseen(self) -> int:
        """Count what is alive and was allocated unseen, note it, and return its bytes."""
        nbytes = 0 if self.guard.failure is not None else sum(map(self._adopt, _visible_storages()))
        if nbytes:
            self._unseen += nbytes
            self.notes[:] = [*(note for note in self.notes if not note.endswith(_UNSEEN)), size(self._unseen) + _UNSEEN]
        return nbytes

    def _note_unseen(self, nbytes: int) -> None:
        """Note which threads of before the recording worked during it; ``nbytes`` were allocated unseen."""
        threads = self._threads.earlier()
        earlier = [one for one in threads if not one.is_logger]
        names = [one.name for one in (earlier or threads) if one.may_have_worked or nbytes]
        if threads and (nbytes or any(one.may_have_worked for one in earlier)):
            shown = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
            self.notes.append(_EARLIER.format(shown))
            self._is_partial = True

    def now_us(self) -> int:
        return self._clock.tick()

    def set_tags(self, tags: AllocationTags) -> None:
        self._tags = tags

    def watches(self, device_type: str) -> bool:
        return device_type == self._device.type

    def oom(self) -> FailedRequest | None:
        if self._oom is None:
            return None
        frames = StackWriter(self._hidden).write([self._oom.captured])[0]
        return FailedRequest(
            self._oom.requested_bytes, self._oom.device_free_bytes, stack_lines(frames), self._oom.time_us
        )

    def forget_oom(self) -> None:
        self._oom = None

    def device(self) -> DeviceInfo:
        from memprof.recording.system.host import device_name, device_total

        total = self._capacity if self._capacity is not None else device_total(self._device.type, self.index)
        return DeviceInfo(self.index, self._device.type, device_name(self._device.type, self.index), total)

    @property
    def index(self) -> int:
        """Return the device's number; 0 where the device has none."""
        return self._device.index or 0

    # -- windows -----------------------------------------------------------------------------------------------

    def open_window(self) -> None:
        self._peaks.append(self._allocated)

    def close_window(self) -> WindowPeaks:
        peak = self._peaks.pop()
        if self._peaks:
            self._peaks[-1] = max(self._peaks[-1], peak)
        return WindowPeaks(peak, None, peak, peak, self._allocated, None)

    # -- writing -----------------------------------------------------------------------------------------------

    def dump(self) -> tuple[RawSnapshot, Recorded]:
        if self._mode is not None and not self._mode.is_elsewhere:  # other threads must not read gradients
            self._adopt_unseen()
        stop_us = self._stop_us or self._clock.tick()
        held = self._held_at_stop if self._held_at_stop is not None else self._held()
        records = list(self._records)
        raw = write_snapshot(records, held, self.index, StackWriter(self._hidden))
        dropped = self._count - len(records)
        history = History.TRUNCATED if dropped else History.STARTED_LATE if self._is_partial else History.COMPLETE
        start_us = min(r.time_us for r in records[:2]) if dropped else self._start_us
        return raw, Recorded(start_us, stop_us, history.value, dropped, self._max_entries, [])

    def _held(self) -> list[Held]:
        born = {r.address: r for r in self._records if isinstance(r, StorageBirth)}
        rows = []
        for watch in list(self._live.values()):
            origin = born.get(watch.address)
            rows.append(Held(watch.address, watch.nbytes, origin.captured if origin else None))
        return rows

    # -- what happens to storages ------------------------------------------------------------------------------

    def see(self, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
        """Account for one operation: what it was given, and what it made."""
        live = self._live
        for value in args:
            if isinstance(value, torch.Tensor):
                if layout_of(value) is STRIDED and storage_key(storage_in_operation(value)) not in live:
                    self._birth(value, func)
            elif isinstance(value, (list, tuple)):
                for tensor in tensors_in(value):
                    if storage_key(storage_in_operation(tensor)) not in live:
                        self._birth(tensor, func)
        if kwargs:
            for tensor in tensors_in(kwargs.values()):
                if storage_key(storage_in_operation(tensor)) not in live:
                    self._birth(tensor, func)
        made = ([out] if layout_of(out) is STRIDED else []) if isinstance(out, torch.Tensor) else tensors_in((out,))
        changes = self._changes(func)
        for tensor in made:
            storage = storage_in_operation(tensor)
            watch = live.get(storage_key(storage))
            if watch is None:
                self._birth(tensor, func)
            elif changes:
                self._check_resized(watch, storage, tensor, func)

    def _changes(self, func: Any) -> bool:
        """Tell whether an operation may give a storage another size."""
        answer = self._mutable.get(func)
        if answer is None:
            schema = OPERATOR_SCHEMA.of(func)
            answer = self._mutable[func] = bool(schema is not None and schema.is_mutable)
        return answer

    def failed(self, error: BaseException) -> None:
        """Note an operation that ran out of memory."""
        match = _CPU_OOM.search(str(error))
        if match is not None:
            self._note_oom(int(match.group(1)), None)
        elif isinstance(error, torch.cuda.OutOfMemoryError):
            self._note_oom(int(getattr(error, "requested_bytes", 0)), None)

    def _note_oom(self, requested: int, free: int | None) -> None:
        captured = self._capture() if self._capture else None
        self._oom = _Failed(requested, free, captured, self._clock.tick())
        if self.on_oom is not None:
            self.on_oom()

    def too_much(self, out: Any) -> int:
        """Return bytes of the result that does not fit the capacity; 0 where everything does."""
        if self._capacity is None:
            return 0
        wanted, seen = self._allocated, set()
        for tensor in tensors_in((out,)):
            storage = storage_in_operation(tensor)
            if storage_key(storage) not in seen and self._ours(storage):
                seen.add(storage_key(storage))
                known = self._live.get(storage_key(storage))
                growth = storage.nbytes() - (known.nbytes if known is not None else 0)
                wanted += growth
                if growth > 0 and wanted > self._capacity:
                    return growth
        return 0

    def refusal(self, requested: int) -> torch.OutOfMemoryError:
        """Note that the device is full; return the error that torch's allocator would raise on one of that size."""
        held, capacity = self._allocated, self._capacity or 0
        free = max(0, capacity - held)
        self._note_oom(requested, free)
        error = torch.cuda.OutOfMemoryError(  # torch before 2.5 has no shorter name
            f"{self._device.type.upper()} out of memory. Tried to allocate {size(requested)}. "
            f"GPU {self.index} has a total capacity of {size(capacity)} of which {size(free)} is free. "
            f"Including non-PyTorch memory, this process has {size(held)} memory in use. "
            f"Of the allocated memory {size(held)} is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
            "unallocated. The capacity is the one memprof was asked to enforce."
        )
        error.requested_bytes = requested  # type: ignore[attr-defined]  # the text rounds
        return error

    def _ours(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether a storage lies on the device that is watched, and is no fake tensor's: DTensor asks operations
        for their shapes with fake tensors, also while the mode watches."""
        device = storage.device
        if device.type != self._device.type or self._device.index not in (None, device.index):
            return False
        return bool(_address(storage))

    def _birth(self, tensor: torch.Tensor, func: Any) -> None:
        self._born(storage_in_operation(tensor), tuple(shape_of(tensor)), dtype_of(tensor), func)

    def _born(self, storage: torch.UntypedStorage, shape: tuple[int, ...], dtype: torch.dtype, func: Any) -> None:
        nbytes = storage.nbytes()
        if not nbytes or not self._ours(storage):
            return
        with self._making:
            if storage_key(storage) in self._live:  # another thread has just counted it
                return
            self._remember(storage, nbytes)
            self._allocated += nbytes
        if self._peaks and self._allocated > self._peaks[-1]:
            self._peaks[-1] = self._allocated
        captured = self._capture() if self._capture is not None else None
        running = self.scope.innermost
        self._count += 1
        self._records.append(
            StorageBirth(
                self._clock.tick(),
                storage.data_ptr(),
                nbytes,
                captured,
                self._tags,
                self._region.now(self._tags.phase, running is not None),
                running,
                shape,
                dtype,
                func,
            )
        )

    def _remember(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        watch = _Watch(storage, self._on_death)
        watch.key = storage_key(storage)
        watch.address = storage.data_ptr()
        watch.nbytes = nbytes
        self._live[watch.key] = watch

    def _adopt(self, storage: torch.UntypedStorage) -> int:
        """Count a storage as older than the recording, unless it is known; return its bytes."""
        if storage_key(storage) in self._live or not self._ours(storage):
            return 0
        if nbytes := storage.nbytes():
            self._remember(storage, nbytes)
            self._allocated += nbytes
            self._is_partial = True
        return nbytes

    def _died(self, watch: Any) -> None:
        # Runs wherever the last reference goes, on any thread and inside any of our own statements.
        known = self._live.get(watch.key)
        if known is not None and known is watch:
            del self._live[known.key]
            self._forget(known)

    def _forget(self, watch: _Watch) -> None:
        self._allocated -= watch.nbytes
        self._count += 1
        at = self._clock.tick()
        self._clock.tick()  # a free is two events in torch's format
        self._records.append(Died(at, watch.address, watch.nbytes))

    def _check_resized(self, watch: _Watch, storage: torch.UntypedStorage, tensor: torch.Tensor, func: Any) -> None:
        if storage.nbytes() == watch.nbytes and storage.data_ptr() == watch.address:
            return
        self._live.pop(watch.key, None)
        self._forget(watch)
        self._birth(tensor, func)

    # -- what no dispatch shows --------------------------------------------------------------------------------

    def _watch_resize(self) -> None:
        """``UntypedStorage.resize_`` frees and allocates without any operation (FSDP does it)."""
        around = self.guard.around(STORAGE_RESIZE.get(), self._before_resize, self._resized)
        self._patches.put(*STORAGE_RESIZE.place(), around)

    def _before_resize(self, args: Args, kwargs: Kwargs) -> torch.UntypedStorage:
        storage: torch.UntypedStorage = args[0]
        if self._capacity is not None and self.is_watching:
            size = args[1] if len(args) > 1 else kwargs["size"]
            grown = size - storage.nbytes()
            if 0 < grown > self._capacity - self._allocated and self._ours(storage):
                raise mark_user_error(self.refusal(size))
        return storage

    def _resized(self, storage: torch.UntypedStorage, _result: Any, _error: BaseException | None) -> None:
        if not self.is_watching:  # another recording, which goes on, has wrapped this one's function
            return
        watch = self._live.get(storage_key(storage))
        if watch is not None:
            if storage.nbytes() == watch.nbytes and storage.data_ptr() == watch.address:
                return
            del self._live[watch.key]
            self._forget(watch)
        if storage.nbytes() and storage.device.type == self._device.type:
            self._born(storage, (storage.nbytes(),), torch.uint8, None)


keep_compiler_off(TensorTrace._died.__code__)


def _visible_storages() -> list[torch.UntypedStorage]:
    """Return the storages of tensors that Python objects stand for, of their gradients, and those without a tensor."""
    found, bare = [], []
    for thing in of_types(_tracked_objects(), _may_have_memory):
        if not is_tensor(thing):
            bare.append(thing)
            continue
        for tensor in (thing, gradient_of(thing)):
            if tensor is not None and (storage := storage_of(tensor)) is not None:
                found.append(storage)
    # A mapped file is a storage, and so is each part of it that a tensor has.
    starts = [*map(_address, found)] if bare else []
    parts = ((one, _address(one), one.nbytes()) for one in bare)
    return found + [one for one, first, nbytes in parts if not any(first <= start < first + nbytes for start in starts)]


def _address(storage: torch.UntypedStorage) -> int:
    """Return where a storage lies; 0 if it has no memory, as those of fake tensors."""
    if storage.device.type == "meta":  # torch warns of asking one
        return 0
    try:
        return storage.data_ptr()
    except RuntimeError:
        return 0


def _may_have_memory(kind: type) -> bool:
    is_plain = is_tensor_type(kind) and getattr(kind, "__torch_dispatch__", PLAIN) is PLAIN
    return is_plain or issubclass(kind, torch.UntypedStorage)


def _tracked_objects() -> list[Any]:
    """Return what the collector tracks, with what ``gc.freeze()`` took off its lists (vLLM's engine does so).

    Frozen objects are found from the modules and from what is not frozen: a second or two for a million of them. What
    only a local variable holds is not: reading a running frame's variables would keep them alive.
    """
    listed = gc.get_objects()
    if not _is_collector_frozen():
        return listed
    seen = {id(thing): thing for thing in listed}
    new: list[Any] = [*listed, sys.modules]
    while new:
        found = {id(thing): thing for thing in filter(gc.is_tracked, gc.get_referents(*new))}
        for known in found.keys() & seen.keys():
            del found[known]
        seen.update(found)
        new = list(found.values())
    return list(seen.values())


def _is_collector_frozen() -> bool:
    return gc.get_freeze_count() > 0
