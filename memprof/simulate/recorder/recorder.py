"""Record fake tensors: hand what no device holds to a model of the allocator, and write it as a snapshot.

A dispatch mode above torch's fake mode sees every storage that an operation makes; a weak reference tells when it
is let go. Both go to :class:`memprof.allocator.model.CachingAllocator`, whose events are the trace. Time is a count of
events: nothing is executed, so there is nothing to clock, and the same simulation gives the same file.
"""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch

from memprof.allocator.model import CachingAllocator, OutOfMemory
from memprof.compat import torch as torch_names
from memprof.compat.patching import Patches
from memprof.recording.frames import StackWriter, capture_function
from memprof.recording.guard import UNGUARDED
from memprof.recording.recorder import DeviceInfo, Recorded, Tags, WindowPeaks
from memprof.recording.trace.module_scope import ModuleScope
from memprof.recording.trace.snapshot_form import Born, _TagWriter
from memprof.recording.trace.training_regions import Region
from memprof.simulate.recorder.autograd_accumulation import puts_in_place, sums_in_place
from memprof.simulate.recorder.host_memory import HostPool
from memprof.simulate.recorder.kernel_workspaces import asks_for_more, early_bytes, hidden_bytes
from memprof.simulate.recorder.owners import FakeOwnerBook
from memprof.simulate.recorder.plain_heap import PlainHeap
from memprof.simulate.recorder.reductions import Processors
from memprof.simulate.recorder.rehearsal import REHEARSED, Rehearsal
from memprof.simulate.recorder.round_log import RoundLog
from memprof.simulate.recorder.snapshot_form import Event, write_snapshot
from memprof.simulate.recorder.work import Work
from memprof.vocabulary import Category, History, Kind

__all__ = ["FakeRecorder"]

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Frames that own no memory: the simulator's, and the commands', so that two commands' runs have the same stacks.
_OURS = (_HERE + os.sep, os.path.join(os.path.dirname(_HERE), "cli") + os.sep)
# In place of an address: host memory, which is counted and has no events; memory that is held in another way.
_HOST, _ELSEWHERE = -1, -2
_graph_task: Any = torch_names.GRAPH_TASK.get()
_FakeTensor: Any = torch_names.FAKE_TENSOR.get()
_key_of: Callable[[Any], int] = attrgetter(torch_names.STORAGE_KEY.name)
_ADD, _PUT = torch.ops.aten.add.Tensor, torch.ops.aten.index_put.default
_EFFICIENT: Any = torch_names.EFFICIENT.get()
_MULTIPLIES = {
    torch.ops.aten.mm.default,
    torch.ops.aten.mm.out,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
}


class _Watch(weakref.ref):  # type: ignore[type-arg]
    """Refer weakly to a storage, and still know its block."""

    __slots__ = ("address", "key", "nbytes", "stream")
    key: int
    address: int
    nbytes: int
    stream: int


class FakeRecorder:
    """See fake storages come and go.

    Args:
        allocator: where blocks come from; its ``on_event`` is taken over.
        device: the snapshot's description of the device.
        cuda: whether kernels' own temporaries and the autograd engine's in-place sums are those of CUDA.
        stacks: ``"python"`` or None.
    """

    def __init__(
        self,
        allocator: CachingAllocator | PlainHeap,
        device: DeviceInfo,
        *,
        cuda: bool = True,
        stacks: str | None = "python",
    ) -> None:
        self.kind = Kind.SIMULATED if cuda else Kind.TRACE
        self.door = UNGUARDED
        self.scope = ModuleScope()
        self.notes: list[str] = []
        self.bounded = False
        self.allocator = allocator
        self.cuda = cuda
        allocator.on_event = self._event
        self._device = device
        self._capture = capture_function(stacks)
        self._tags = Tags()
        self._tag_writer = _TagWriter()
        self._clock = 0
        self._events: list[Event] = []
        self._live: dict[int, _Watch] = {}
        self._origin: dict[int, tuple[Any, str]] = {}
        self._captured: Any = None
        self._tag = ""
        self._region = Region()
        self._windows: list[list[int]] = []
        self._patches = Patches()
        self._running = False
        self._oom: dict[str, Any] | None = None
        self.owners: FakeOwnerBook | None = None
        # cuBLAS's workspace for each thread that multiplies: the caller's and the autograd engine's.
        self.workspace = 0
        self._workspaces: set[bool] = set()
        self.processors = Processors(132, 2048)
        self.stream_of: Callable[[], int] | None = None
        self.paused = 0
        self.host = HostPool()
        self.work = Work()
        self._on_host = 0
        self._noted: RoundLog | None = None
        self._rehearsal: Rehearsal | None = None
        self._claims = 0

    # -- recorder ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch: module scopes, optimizers, storages that are resized."""
        if self._running:
            return
        self._running = True
        self.scope.start()
        self._region.start()
        self._watch_resize()

    def stop(self) -> None:
        """Stop watching; what is alive stays alive in the snapshot."""
        if not self._running:
            return
        self._running = False
        self.scope.stop()
        self._region.stop()
        self._patches.restore()

    def now_us(self) -> int:
        """Return the time: the count of events and marks so far, this one included."""
        self._clock += 1
        return self._clock

    def set_tags(self, tags: Tags) -> None:
        self._tags = tags

    def watches(self, device_type: str) -> bool:
        return True

    def device(self) -> DeviceInfo:
        return self._device

    def oom(self) -> dict[str, Any] | None:
        if self._oom is None:
            return None
        found = dict(self._oom)
        frames = StackWriter(_OURS).write([found.pop("captured")])[0]
        found["stack"] = [f"{f['filename']}:{f['line']} {f['name']}" for f in frames]
        return found

    def forget_oom(self) -> None:
        self._oom = None

    def open_window(self) -> None:
        heap = self.allocator
        self._windows.append([heap.allocated, heap.reserved, heap.active, heap.requested])

    def close_window(self) -> WindowPeaks:
        peaks = self._windows.pop()
        if self._windows:
            self._windows[-1] = [max(a, b) for a, b in zip(self._windows[-1], peaks, strict=True)]
        allocated, reserved, active, requested = peaks
        heap = self.allocator
        return WindowPeaks(
            allocated,
            reserved if self.cuda else None,
            active,
            requested,
            heap.allocated,
            heap.reserved if self.cuda else None,
        )

    def dump(self) -> tuple[dict[str, Any], Recorded]:
        raw = write_snapshot(self._events, self.allocator, self._origin, self._device.index, _OURS)
        return raw, Recorded(0, self._clock, History.COMPLETE.value, 0, None, [])

    # -- storages ----------------------------------------------------------------------------------------------

    @property
    def allocated(self) -> int:
        """Return the bytes of blocks in use now."""
        return self.allocator.allocated

    def address_of(self, storage: Any) -> int:
        """Return the simulated address of a storage; 0 if it has none."""
        watch = self._live.get(_key_of(storage))
        return watch.address if watch is not None and watch.address > 0 else 0

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, alike: int | None = None) -> None:
        """Account for what an operation made, its kernel's own temporaries included.

        ``alike``: a number that only calls of this operation with arguments of the same shapes have.
        """
        early = [self._malloc(size, (size,), torch.uint8, func)[0] for size in self._early(func, args)]
        live = self._live
        made = []
        if func is _EFFICIENT:  # the seed and offset of dropout stay on the host
            out = out[:2]
        for tensor in _fakes((out,)):
            storage = tensor.untyped_storage()
            watch = live.get(_key_of(storage))
            if watch is None:
                if self.cuda and self._in_place(func, args):
                    self._inherit(args[0], storage)
                else:
                    self.birth(tensor, func)
                made.append(tensor)
            elif watch.nbytes != storage.nbytes() and not self.paused:
                self._resized(storage)
        if self.workspace and func in _MULTIPLIES:  # the kernel's, which has its result already
            self.claim_workspace()
        if self.cuda and not self.paused and asks_for_more(func):
            if self._rehearsal is not None:
                self._rehearsal.kernel(func, args, kwargs, made)
            else:
                self.run_kernel(func, args, kwargs, made)
        for address in early:
            self.release(address)
        if self.cuda and not self.paused:
            self.work.see(func, args, kwargs, out, *self.phase_and_step(), alike)

    def count_work(self, func: Any, args: tuple[Any, ...]) -> None:
        """Count a kernel's work that no dispatch shows."""
        self.work.see(func, args, {}, None, *self.phase_and_step())

    def phase_and_step(self) -> tuple[str, int | None]:
        """Return the phase that runs now and its step."""
        return self._tags.phase, self._tags.step

    def run_kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Sequence[Any]) -> None:
        """Take what an operation's kernel takes beside its results, and give it back."""
        for sizes in hidden_bytes(func, args, kwargs, made, self.processors):
            self.scratch(sizes, func)

    def _early(self, func: Any, args: tuple[Any, ...]) -> list[int]:
        return early_bytes(func, args) if self.cuda and not self.paused else []

    @staticmethod
    def _in_place(func: Any, args: tuple[Any, ...]) -> bool:
        return (func is _ADD and sums_in_place(args)) or (func is _PUT and puts_in_place())

    def claim_workspace(self) -> None:
        """Take cuBLAS's workspace for this thread, where it has none."""
        if self._rehearsal is not None:
            self._rehearsal.workspace()
            return
        in_engine = _graph_task() != -1
        if in_engine not in self._workspaces:
            self._workspaces.add(in_engine)
            self.hold(self.workspace, Category.WORKSPACE, self.owners, "cuBLAS workspace")

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Count what is made inside as pinned host memory, not the device's, for as long as it lives."""
        self._on_host += 1
        try:
            yield
        finally:
            self._on_host -= 1

    def birth(self, tensor: torch.Tensor, func: Any = None) -> None:
        """Take memory for a tensor's storage, unless it is known already."""
        if _key_of(tensor.untyped_storage()) not in self._live:
            self._born(tensor.untyped_storage(), tuple(tensor.shape), tensor.dtype, func)

    def scratch(self, sizes: list[int], func: Any = None) -> None:
        """Take memory of these sizes together and give it back at once."""
        taken = [self._malloc(nbytes, (nbytes,), torch.uint8, func)[0] for nbytes in sizes if nbytes]
        for address in taken:
            self.release(address)

    def hold(
        self,
        nbytes: int,
        category: Category,
        owners: FakeOwnerBook | None,
        name: str,
        detail: str | None = None,
    ) -> int:
        """Take memory that no tensor stands for (workspaces, engine pools) and return its address; it stays."""
        address, _ = self._malloc(nbytes, (nbytes,), torch.uint8, None)
        if owners is not None:
            owners.claim_address(address, category, detail, name)
        return address

    def disown(self, tensor: torch.Tensor) -> None:
        """Give back the memory of a tensor that is accounted for elsewhere (by :meth:`hold`), for good."""
        storage: Any = tensor.untyped_storage()
        watch = self._live.pop(_key_of(storage), None)
        if watch is not None:
            self._give_back(watch)
        self._remember(storage, _ELSEWHERE, storage.nbytes(), 0)

    def take_away(self, tensor: torch.Tensor) -> None:
        """Give back the memory of a tensor that lives on elsewhere, until :meth:`birth` takes memory for it again."""
        watch = self._live.pop(_key_of(tensor.untyped_storage()), None)
        if watch is not None:
            self._give_back(watch)

    def release(self, address: int) -> None:
        """Give back what :meth:`hold` or :meth:`take` took."""
        if address >= REHEARSED:
            if self._rehearsal is not None:
                self._rehearsal.give(address)
            return
        if self._rehearsal is not None:
            self._rehearsal.usable = False  # of something that was there before
        self._captured, self._tag = None, ""
        self._origin.pop(address, None)
        self.allocator.free(address)
        if self._noted is not None:
            self._noted.freed(address)

    def note(self) -> RoundLog | None:
        """Log allocations and frees from now on; return None where a log is kept already."""
        if self._noted is not None or self._rehearsal is not None:
            return None
        self._noted = RoundLog()
        self.work.also.append(self._noted.work)
        self._claims = self.owners.claims if self.owners is not None else 0
        return self._noted

    def end_note(self, noted: RoundLog) -> None:
        """Stop logging allocations."""
        self._noted = None
        self.work.also.remove(noted.work)
        if self.owners is not None and self.owners.claims != self._claims:
            noted.only_device = False

    def repeat_work(self, noted: RoundLog) -> None:
        """Count what a round computed and moved once more."""
        if noted.work.kernels or noted.work.fused or noted.work.host_bytes:
            self.work.add(noted.work, 1, *self.phase_and_step())

    def watch_at(self, address: int) -> Any:
        """Return what stands for the storage at ``address``, None if nothing does; its ``address`` may be changed."""
        return next((watch for watch in self._live.values() if watch.address == address), None)

    def _born(self, storage: Any, shape: tuple[int, ...], dtype: torch.dtype, func: Any) -> None:
        nbytes = storage.nbytes()
        if not nbytes or self.paused:
            return
        if self._on_host:
            self._beyond_device()
            self.host.malloc(nbytes)
            self.work.to_host(2 * nbytes, *self.phase_and_step())  # there, and back
            self._remember(storage, _HOST, nbytes, 0)
            return
        address, stream = self._malloc(nbytes, shape, dtype, func)
        self._remember(storage, address, nbytes, stream)

    def _beyond_device(self) -> None:
        """Mark all logs: host memory was allocated or freed, which none of them repeats."""
        if self._noted is not None:
            self._noted.only_device = False
        if self._rehearsal is not None:
            self._rehearsal.usable = False

    def _malloc(self, nbytes: int, shape: tuple[int, ...], dtype: torch.dtype, func: Any) -> tuple[int, int]:
        captured = self._capture() if self._capture is not None else None
        running = self.scope.innermost
        region = self._region.now(self._tags.phase, running is not None)
        born = Born(0, 0, nbytes, None, self._tags, region, running, shape, dtype, func)
        stream = self.stream_of() if self.stream_of is not None else 0
        if self._rehearsal is not None:
            return self._rehearsal.take(born, stream, captured), stream
        return self.take(nbytes, stream, captured, self._tag_writer.write(born)), stream

    def take(self, nbytes: int, stream: int, captured: Any, tag: str) -> int:
        """Take memory for this stack and under this tag, and return its address.

        Raises:
            OutOfMemory: the simulated device is full.
        """
        self._captured, self._tag = captured, tag
        try:
            address, _ = self.allocator.malloc(nbytes, stream)
        except OutOfMemory as error:
            self.tell_oom(error, captured)
            raise
        self._origin[address] = (captured, self._tag)
        heap = self.allocator
        self.widen_window(heap.allocated, heap.reserved, heap.active, heap.requested)
        if self._noted is not None:
            self._noted.born(address, nbytes, stream, captured, tag)
        return address

    def tell_oom(self, error: OutOfMemory, captured: Any) -> None:
        """Note that the simulated device is full."""
        self._oom = {
            "requested_bytes": error.requested,
            "device_free_bytes": error.free,
            "captured": captured,
            "time_us": self._clock,
        }

    def widen_window(self, *highest: int) -> None:
        """Count highest values (allocated, reserved, active, requested bytes) in the window that is open."""
        if self._windows:
            self._windows[-1] = [max(a, b) for a, b in zip(self._windows[-1], highest, strict=True)]

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[Rehearsal]:
        """Log what runs while open, unseen by the device. What is allocated while open must be freed by its end."""
        assert self._rehearsal is None
        self._rehearsal = Rehearsal()
        try:
            yield self._rehearsal
            if self._rehearsal.alive:  # in circles of references
                gc.collect()
        finally:
            self._rehearsal = None

    @property
    def rehearsal(self) -> Rehearsal | None:
        """Return the log that is kept now."""
        return self._rehearsal

    def tag_of(self, born: Born) -> str:
        """Return the tag of an allocation made under the current tags."""
        return self._tag_writer.write(born._replace(tags=self._tags))

    @contextlib.contextmanager
    def untold(self, cause: Callable[[], tuple[Any, str]]) -> Iterator[None]:
        """Suppress the events of allocations and frees while open; ``cause``: stack and tag of other events."""

        def of_segments(action: str, address: int, size: int, stream: int, pool: int) -> None:
            self._captured, self._tag = cause()
            self._event(action, address, size, stream, pool)

        heap = self.allocator
        assert isinstance(heap, CachingAllocator)
        heap.on_event, heap.tells_blocks = of_segments, False
        try:
            yield
        finally:
            heap.on_event, heap.tells_blocks = self._event, True

    def retell(self, before: Iterable[tuple[int, int, int]], now: Iterable[tuple[int, int, int, Any, str]]) -> None:
        """Tell where blocks lie now that were elsewhere: (address, bytes, stream), and now with stack and tag."""
        for address, size, stream in before:
            self._captured, self._tag = None, ""
            self._origin.pop(address, None)
            self._event("free_requested", address, size, stream, 0)
            self._event("free_completed", address, size, stream, 0)
        for address, size, stream, captured, tag in now:
            self._captured, self._tag = captured, tag
            self._origin[address] = (captured, tag)
            self._event("alloc", address, size, stream, 0)

    def _remember(self, storage: Any, address: int, nbytes: int, stream: int) -> None:
        watch = _Watch(storage, self._died)
        watch.key, watch.address, watch.nbytes, watch.stream = _key_of(storage), address, nbytes, stream
        self._live[watch.key] = watch

    def _died(self, watch: Any) -> None:
        # After the end, what is alive stays alive in the snapshot.
        known: Any = self._live.get(watch.key)
        if not self._running or known is not watch:
            return
        del self._live[watch.key]
        self._give_back(watch)

    def _give_back(self, watch: _Watch) -> None:
        if watch.address == _HOST:
            self._beyond_device()
            self.host.free(watch.nbytes)
        elif watch.address != _ELSEWHERE:
            self.release(watch.address)

    def _resized(self, storage: Any) -> None:
        watch = self._live.pop(_key_of(storage), None)
        if watch is not None:
            self._give_back(watch)
        if storage.nbytes():
            self._born(storage, (storage.nbytes(),), torch.uint8, None)

    def _event(self, action: str, address: int, size: int, stream: int, pool: int) -> None:
        self._clock += 1
        self._events.append(Event(action, address, size, self._clock, stream, pool, self._captured, self._tag))

    # -- what no dispatch shows --------------------------------------------------------------------------------

    def _inherit(self, first: Any, storage: Any) -> None:
        old = first.untyped_storage()
        watch = self._live.pop(_key_of(old), None)
        if watch is None or watch.nbytes != storage.nbytes():
            if watch is not None:
                self._live[watch.key] = watch
            self._born(storage, tuple(first.shape), first.dtype, _ADD)
            return
        self._remember(storage, watch.address, watch.nbytes, watch.stream)

    def _watch_resize(self) -> None:
        original = torch_names.STORAGE_RESIZE.get()
        recorder = self

        def resize_(self: torch.UntypedStorage, size: int) -> Any:
            result = original(self, size)
            if recorder._running and not recorder.paused and self.device.type == "meta":
                watch = recorder._live.get(_key_of(self))
                if (watch.nbytes if watch else 0) != self.nbytes():
                    recorder._resized(self)
            return result

        self._patches.put(*torch_names.STORAGE_RESIZE.place(), resize_)


def _fakes(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if isinstance(value, _FakeTensor):
            if value.fake_device.type != "meta" and value.layout is torch.strided:
                found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _fakes(value)
    return found
