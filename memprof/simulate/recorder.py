"""A recorder of fake tensors: what no device holds, handed to a model of the allocator and written as a snapshot.

A dispatch mode above torch's fake mode sees every storage that an operation makes; a weak reference tells when it
is let go. Both go to :class:`memprof.allocator.CachingAllocator`, whose events are the trace. Time is a count of
events: nothing is executed, so there is nothing to clock, and the same simulation gives the same file.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from memprof.allocator import AllocatorSettings, CachingAllocator, OutOfMemory
from memprof.record.frames import StackWriter, capture_function
from memprof.record.owners import OwnerBook, storages_of
from memprof.record.protocol import DeviceInfo, Recorded, Tags, WindowPeaks
from memprof.record.scope import ModuleScope
from memprof.record.trace_format import Born, _TagWriter
from memprof.simulate.hidden import hidden_bytes
from memprof.vocabulary import Category, History, Kind, Phase

__all__ = ["FakeOwnerBook", "FakeRecorder", "PlainHeap", "Tracking", "scalar_of"]

_OURS = (os.path.dirname(os.path.abspath(__file__)) + os.sep,)  # frames that own no memory
_graph_task = torch._C._current_graph_task_id
_ADD = torch.ops.aten.add.Tensor
_DEVICE = torch.ops.prim.device.default
_MULTIPLIES = {
    torch.ops.aten.mm.default,
    torch.ops.aten.mm.out,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
}
_ENGINE = "_engine_run_backward"


class _Event(NamedTuple):
    action: str
    address: int
    size: int
    time: int
    stream: int
    pool: int
    captured: Any
    tag: str


class _Watch(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that still knows its block."""

    __slots__ = ("address", "key", "nbytes", "stream")
    key: int
    address: int
    nbytes: int
    stream: int


class FakeRecorder:
    """Sees fake storages come and go.

    Args:
        allocator: where blocks come from; its ``on_event`` is taken over.
        device: what is said of the device in the snapshot.
        cuda: whether kernels' own temporaries and the autograd engine's in-place sums are those of CUDA.
        stacks: ``"python"`` or None.
    """

    def __init__(
        self, allocator: CachingAllocator | PlainHeap, device: DeviceInfo, *, cuda: bool = True, stacks: str | None = "python"
    ) -> None:
        self.kind = Kind.SIMULATED if cuda else Kind.TRACE
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
        self._events: list[_Event] = []
        self._live: dict[int, _Watch] = {}
        self._origin: dict[int, tuple[Any, str]] = {}
        self._captured: Any = None
        self._tag = ""
        self._optimizer_depth = 0
        self._windows: list[list[int]] = []
        self._handles: list[Any] = []
        self._resize: Any = None
        self._running = False
        self._oom: dict[str, Any] | None = None
        self.owners: OwnerBook | None = None
        # cuBLAS's workspace for each thread that multiplies: the caller's and the autograd engine's.
        self.workspace = 0
        self._workspaces: set[bool] = set()
        self.stream_of: Callable[[], int] | None = None
        self.paused = 0

    # -- recorder ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch: module scopes, optimizers, storages that are resized."""
        if self._running:
            return
        self._running = True
        self.scope.start()
        self._watch_optimizers()
        self._watch_resize()

    def stop(self) -> None:
        """What is alive stays alive in the snapshot."""
        if not self._running:
            return
        self._running = False
        self.scope.stop()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if torch.UntypedStorage.__dict__.get("resize_") is self._resize:
            del torch.UntypedStorage.resize_

    def now_us(self) -> int:
        """The count of events and marks so far."""
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
            allocated, reserved if self.cuda else None, active, requested, heap.allocated, heap.reserved if self.cuda else None
        )

    def dump(self) -> tuple[dict[str, Any], Recorded]:
        stacks = StackWriter(_OURS)
        frames = stacks.write([e.captured for e in self._events])
        trace = [
            {
                "action": e.action,
                "addr": e.address,
                "size": e.size,
                "stream": e.stream,
                "segment_pool_id": (0, e.pool),
                "time_us": e.time,
                "compile_context": "",
                "user_metadata": e.tag,
                "frames": where,
            }
            for e, where in zip(self._events, frames, strict=True)
        ]
        for row in trace:
            if row["action"] == "oom":
                row["device_free"] = row.pop("addr")
        segments = self.allocator.segments()
        self._add_frames(segments, stacks)
        settings = self.allocator.settings
        raw = {
            "segments": segments,
            "device_traces": [*([] for _ in range(self._device.index)), trace],
            "allocator_settings": {"expandable_segments": settings.expandable_segments},
            "external_annotations": [],
        }
        return raw, Recorded(0, self._clock, History.COMPLETE.value, 0, None, [])

    def _add_frames(self, segments: list[dict[str, Any]], stacks: StackWriter) -> None:
        blocks = [b for s in segments for b in s["blocks"] if b["state"] != "inactive"]
        origins = [self._origin.get(b["address"], (None, "")) for b in blocks]
        for block, frames, (_, tag) in zip(blocks, stacks.write([c for c, _ in origins]), origins, strict=True):
            block["frames"] = frames
            block["user_metadata"] = tag

    # -- storages ----------------------------------------------------------------------------------------------

    @property
    def allocated(self) -> int:
        """Bytes of blocks in use now."""
        return self.allocator.allocated

    def address_of(self, storage: Any) -> int:
        """The simulated address of a storage; 0 if it has none."""
        watch = self._live.get(storage._cdata)
        return watch.address if watch is not None else 0

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Account for what an operation made, its kernel's own temporaries included."""
        if self.workspace and func in _MULTIPLIES:
            self._claim_workspace()
        live = self._live
        made = []
        for tensor in _fakes((out,)):
            storage = tensor.untyped_storage()
            watch = live.get(storage._cdata)
            if watch is None:
                if func is _ADD and self.cuda and self._sums_in_place(args):
                    self._inherit(args[0], storage)
                else:
                    self.birth(tensor, func)
                made.append(tensor)
            elif watch.nbytes != storage.nbytes() and not self.paused:
                self._resized(storage)
        if self.cuda:
            self.scratch(hidden_bytes(func, args, kwargs, made), func)

    def _claim_workspace(self) -> None:
        in_engine = _graph_task() != -1
        if in_engine not in self._workspaces:
            self._workspaces.add(in_engine)
            self.hold(self.workspace, Category.WORKSPACE, self.owners, "cuBLAS workspace")

    def birth(self, tensor: torch.Tensor, func: Any = None) -> None:
        """A tensor's storage came to be."""
        self._born(tensor.untyped_storage(), tuple(tensor.shape), tensor.dtype, func)

    def scratch(self, sizes: list[int], func: Any = None) -> None:
        """Memory of these sizes that is asked for together and given back at once."""
        taken = [self._malloc(nbytes, (nbytes,), torch.uint8, func)[0] for nbytes in sizes if nbytes]
        for address in taken:
            self.release(address)

    def hold(self, nbytes: int, category: Category, owners: OwnerBook | None, name: str) -> int:
        """Memory that no tensor stands for (workspaces, engine pools) and that stays; its address."""
        address, _ = self._malloc(nbytes, (nbytes,), torch.uint8, None)
        if owners is not None and isinstance(owners, FakeOwnerBook):
            owners.claim_address(address, category, None, name)
        return address

    def release(self, address: int) -> None:
        """Give back what :meth:`hold` took."""
        self._captured, self._tag = None, ""
        self._origin.pop(address, None)
        self.allocator.free(address)

    def _born(self, storage: Any, shape: tuple[int, ...], dtype: torch.dtype, func: Any) -> None:
        nbytes = storage.nbytes()
        if not nbytes or self.paused:
            return
        address, stream = self._malloc(nbytes, shape, dtype, func)
        self._remember(storage, address, nbytes, stream)

    def _malloc(self, nbytes: int, shape: tuple[int, ...], dtype: torch.dtype, func: Any) -> tuple[int, int]:
        captured = self._capture() if self._capture is not None else None
        running = self.scope.innermost
        born = Born(0, 0, nbytes, None, self._tags, self._region(running is not None), running, shape, dtype, func)
        self._captured, self._tag = captured, self._tag_writer.write(born)
        stream = self.stream_of() if self.stream_of is not None else 0
        try:
            address, _ = self.allocator.malloc(nbytes, stream)
        except OutOfMemory as error:
            self._oom = {
                "requested_bytes": error.requested,
                "device_free_bytes": error.free,
                "captured": captured,
                "time_us": self._clock,
            }
            raise
        self._origin[address] = (captured, self._tag)
        heap = self.allocator
        if self._windows:
            window = self._windows[-1]
            window[:] = (
                max(window[0], heap.allocated),
                max(window[1], heap.reserved),
                max(window[2], heap.active),
                max(window[3], heap.requested),
            )
        return address, stream

    def _remember(self, storage: Any, address: int, nbytes: int, stream: int) -> None:
        watch = _Watch(storage, self._died)
        watch.key, watch.address, watch.nbytes, watch.stream = storage._cdata, address, nbytes, stream
        self._live[watch.key] = watch

    def _died(self, watch: Any) -> None:
        if self._running and self._live.get(watch.key) is watch:
            del self._live[watch.key]
            self._captured, self._tag = None, ""
            self._origin.pop(watch.address, None)
            self.allocator.free(watch.address)

    def _resized(self, storage: Any) -> None:
        watch = self._live.pop(storage._cdata, None)
        if watch is not None:
            self._captured, self._tag = None, ""
            self._origin.pop(watch.address, None)
            self.allocator.free(watch.address)
        if storage.nbytes():
            self._born(storage, (storage.nbytes(),), torch.uint8, None)

    def _event(self, action: str, address: int, size: int, stream: int, pool: int) -> None:
        self._clock += 1
        self._events.append(_Event(action, address, size, self._clock, stream, pool, self._captured, self._tag))

    def _region(self, in_module: bool) -> str:
        if self._optimizer_depth or self._tags.phase == Phase.OPTIMIZER_STEP.value:
            return "optimizer"
        if _graph_task() != -1:
            return "recompute" if in_module else "backward"
        if in_module:
            return "forward" if torch.is_grad_enabled() else "no_grad"
        return "outside"

    # -- what no dispatch shows --------------------------------------------------------------------------------

    def _sums_in_place(self, args: tuple[Any, ...]) -> bool:
        """Whether the autograd engine, adding up two gradients of one value, would write into the first.

        It does so when it holds the only reference, but never under a dispatch mode: there it allocates a third
        tensor that CUDA does not.
        """
        if _graph_task() == -1 or torch.is_grad_enabled() or len(args) != 2:
            return False
        first, second = args
        if not isinstance(first, FakeTensor) or not isinstance(second, FakeTensor):
            return False
        if first.shape != second.shape or first.dtype != second.dtype or first.numel() == 0:
            return False
        return _called_by_engine() and _sole_owner(first)

    def _inherit(self, first: FakeTensor, storage: Any) -> None:
        old = first.untyped_storage()
        watch = self._live.pop(old._cdata, None)
        if watch is None or watch.nbytes != storage.nbytes():
            if watch is not None:
                self._live[watch.key] = watch
            self._born(storage, tuple(first.shape), first.dtype, _ADD)
            return
        self._remember(storage, watch.address, watch.nbytes, watch.stream)

    def _watch_optimizers(self) -> None:
        from torch.optim import optimizer as hooks

        def before(*_: Any) -> None:
            self._optimizer_depth += 1

        def after(*_: Any) -> None:
            self._optimizer_depth = max(0, self._optimizer_depth - 1)

        self._handles += [
            hooks.register_optimizer_step_pre_hook(before),
            hooks.register_optimizer_step_post_hook(after),
        ]

    def _watch_resize(self) -> None:
        original = torch.UntypedStorage.resize_
        recorder = self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if recorder._running and not recorder.paused and storage.device.type == "meta":
                watch = recorder._live.get(storage._cdata)
                if (watch.nbytes if watch else 0) != storage.nbytes():
                    recorder._resized(storage)
            return result

        self._resize = resize_
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]


class PlainHeap:
    """Memory without an allocator: every storage is as large as it says, at an address of its own (the CPU)."""

    def __init__(self) -> None:
        self.on_event: Callable[[str, int, int, int, int], None] | None = None
        self.settings = AllocatorSettings()
        self.reserved = self.allocated = 0
        self._next = 0x10_0000_0000
        self._live: dict[int, int] = {}

    @property
    def active(self) -> int:
        """Bytes in use; the same as allocated and requested."""
        return self.allocated

    @property
    def requested(self) -> int:
        """Bytes in use."""
        return self.allocated

    def malloc(self, size: int, stream: int = 0, pool: int = 0) -> tuple[int, int]:
        """An address for ``size`` bytes."""
        address, self._next = self._next, self._next + -(-max(size, 1) // 64) * 64
        self._live[address] = size
        self.allocated += size
        if self.on_event is not None:
            self.on_event("alloc", address, size, 0, 0)
        return address, size

    def free(self, address: int) -> None:
        """Give it back."""
        size = self._live.pop(address)
        self.allocated -= size
        if self.on_event is not None:
            self.on_event("free_requested", address, size, 0, 0)
            self.on_event("free_completed", address, size, 0, 0)

    def segments(self) -> list[dict[str, Any]]:
        """Each storage as a segment of its own, as a tensor trace has it."""
        return [_own_segment(address, size) for address, size in self._live.items()]


def _own_segment(address: int, size: int) -> dict[str, Any]:
    sizes = dict.fromkeys(("total_size", "allocated_size", "active_size", "requested_size"), size)
    block = {"address": address, "size": size, "requested_size": size, "state": "active_allocated", "frames": []}
    return {
        "device": 0,
        "address": address,
        **sizes,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [block],
    }


class FakeOwnerBook(OwnerBook):
    """Owners of fake storages, whose addresses only the recorder knows."""

    def __init__(self, recorder: FakeRecorder) -> None:
        super().__init__(recorder.now_us, recorder.watches)
        self._recorder = recorder

    def claim(self, tensor: torch.Tensor, category: Category, detail: str | None, name: str | None) -> None:
        for storage in storages_of(tensor):
            known = self._claimed.get(storage._cdata)
            if known is not None and known() is storage:
                continue
            if address := self._recorder.address_of(storage):
                self._claimed[storage._cdata] = weakref.ref(storage)
                self.claim_address(address, category, detail, name)

    def claim_address(self, address: int, category: Category, detail: str | None, name: str | None) -> None:
        """Note what the block alive at ``address`` is."""
        self._rows.append((address, self._now(), category.value, detail, name))


class Tracking(TorchDispatchMode):
    """Shows every operation to the recorder, and answers those that ask for values no fake tensor has.

    Args:
        recorder: told of every operation.
        truth: what ``mask.all()`` is: True where nothing is padded.
        selected: how many entries of a boolean mask of this shape are set (an upper bound where unknown).
    """

    supports_higher_order_operators = True

    def __init__(self, recorder: FakeRecorder, truth: bool, selected: Callable[[tuple[int, ...]], int]) -> None:
        super().__init__()
        self._recorder = recorder
        self._truth = truth
        self._selected = selected
        self._foreign: dict[type, bool] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # asked for by C++ at every turn; nothing is made
            return args[0].fake_device if type(args[0]) is FakeTensor else func(*args)
        kwargs = kwargs or {}
        for kind in types:
            if self._is_foreign(kind):
                return NotImplemented
        special = _SPECIAL.get(func)
        out = special(self, func, args, kwargs) if special is not None else func(*args, **kwargs)
        self._recorder.see(func, args, kwargs, out)
        return out

    def _is_foreign(self, kind: type) -> bool:
        answer = self._foreign.get(kind)
        if answer is None:
            plain = (torch.Tensor, torch.nn.Parameter, FakeTensor)
            implements = getattr(kind, "__torch_dispatch__", torch._C._disabled_torch_dispatch_impl)
            answer = kind not in plain and implements is not torch._C._disabled_torch_dispatch_impl
            answer = self._foreign[kind] = answer and not issubclass(kind, FakeTensor)
        return answer

    def _scalar(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        if not isinstance(tensor, FakeTensor):
            return func(*args, **kwargs)
        if tensor.constant is not None:
            return tensor.constant.item()
        return scalar_of(tensor)

    def _reduced(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if isinstance(out, FakeTensor):
            # Masks are asked by transformers whether anything is padded; elsewhere it is "is everything NaN?".
            out._memprof_scalar = self._truth and _asked_by("transformers")  # type: ignore[attr-defined]
        return out

    def _index(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``x[mask]``: the kernel finds the positions first, as an integer list of two columns at most."""
        source, indices = args[0], args[1]
        masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
        if not masks:
            return func(*args, **kwargs)
        plain: list[Any] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                plain.append(index)
                continue
            found = source.new_empty((self._selected(tuple(index.shape)), index.dim()), dtype=torch.int64)
            if self._recorder.cuda:  # a tensor trace on the CPU cannot see it either
                self._recorder.see(torch.ops.aten.nonzero.default, (index,), {}, found)
            plain += [found[:, i] for i in range(index.dim())]
        return func(source, plain, *args[2:], **kwargs)

    def _nonzero(self, func: Any, args: Any, kwargs: Any) -> Any:
        mask = args[0]
        return mask.new_empty((self._selected(tuple(mask.shape)), mask.dim()), dtype=torch.int64)

    def _masked_select(self, func: Any, args: Any, kwargs: Any) -> Any:
        return args[0].new_empty((self._selected(tuple(args[1].shape)),))


_ATEN = torch.ops.aten
_SPECIAL: dict[Any, Callable[[Tracking, Any, Any, Any], Any]] = {
    _ATEN._local_scalar_dense.default: Tracking._scalar,
    _ATEN.all.default: Tracking._reduced,
    _ATEN.index.Tensor: Tracking._index,
    _ATEN.nonzero.default: Tracking._nonzero,
    _ATEN.masked_select.default: Tracking._masked_select,
}


def scalar_of(tensor: Any) -> Any:
    """A value for a scalar nobody computed: what ``all`` is said to be, else False, 1 or 1.0."""
    known = getattr(tensor, "_memprof_scalar", None)
    if known is not None:
        return known
    if tensor.dtype is torch.bool:
        return False
    return 1.0 if tensor.dtype.is_floating_point else 1


def _fakes(values: Iterable[Any]) -> list[FakeTensor]:
    found: list[FakeTensor] = []
    for value in values:
        if isinstance(value, FakeTensor):
            if value.fake_device.type != "meta" and value.layout is torch.strided:
                found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _fakes(value)
    return found


def _called_by_engine() -> bool:
    """Whether no Python code lies between the autograd engine and the operation being dispatched."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    while frame is not None and frame.f_globals.get("__name__") in _PLUMBING:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == _ENGINE


def _asked_by(package: str) -> bool:
    """Whether the innermost Python code outside torch belongs to ``package``."""
    frame: Any = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith((__name__, "torch.", "contextlib")):
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(package)


_PLUMBING = ("torch.utils._python_dispatch", "torch._ops", "contextlib")


def _sole_owner(tensor: FakeTensor) -> bool:
    """Whether the engine held the only reference to a gradient it is about to add to."""
    return tensor._use_count() <= _ALONE and torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= _ALONE_STORAGE  # type: ignore[attr-defined]


# References seen from inside a dispatch when the engine holds one: its own, the argument, its wrapper and the list.
_ALONE = 4
_ALONE_STORAGE = 2
