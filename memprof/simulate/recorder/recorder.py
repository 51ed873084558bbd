"""Record fake tensors: hand what no device holds to a model of the allocator, and write it as a snapshot.

A dispatch mode above torch's fake mode sees every storage that an operation makes; a weak reference tells when it
is let go. Both go to :class:`memprof.allocator.model.CachingAllocator`, whose events are the trace. Time is a count of
events: nothing is executed, so there is nothing to clock, and the same simulation gives the same file.
"""

from __future__ import annotations

import os
import sys
from typing import Any, cast

import torch

from memprof.allocator.model import CachingAllocator
from memprof.compat import torch as torch_names
from memprof.foreign import Args, Kwargs
from memprof.recording.frames import StackWriter, capture_function, stack_lines
from memprof.recording.guard import NULL_GUARD
from memprof.recording.recorder import AllocationTags, DeviceInfo, FailedRequest, RawSnapshot, Recorded, WindowPeaks
from memprof.simulate.recorder.autograd_accumulation import puts_in_place, sums_in_place
from memprof.simulate.recorder.blocks import SimulatedBlocks
from memprof.simulate.recorder.decode_log import Kernel
from memprof.simulate.recorder.flops import PhaseWork
from memprof.simulate.recorder.kernel_workspaces import KernelMemory
from memprof.simulate.recorder.plain_heap import PlainHeap
from memprof.simulate.recorder.storages import Storages
from memprof.simulate.recorder.trace import frames_of
from memprof.vocabulary import History, Kind

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Frames that own no memory: the simulator's, and the commands', so that two commands' runs have the same stacks; and
# torch's where the simulator's kernels call operations.
_OURS = (_HERE + os.sep, os.path.join(os.path.dirname(_HERE), "cli") + os.sep, str(sys.modules["torch._ops"].__file__))
_FakeTensor: Any = torch_names.FAKE_TENSOR.get()
_ADD, _PUT = torch.ops.aten.add.Tensor, torch.ops.aten.index_put.default
_EFFICIENT: Any = torch_names.EFFICIENT.get()


class FakeRecorder:
    """See operations on fake tensors, and tell what each of them concerns: ``storages``, ``blocks``, ``kernels``,
    ``work``.

    ``cuda``: kernels' own temporaries and the autograd engine's in-place sums are those of CUDA. The allocator's
    ``on_event`` is taken over.
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
        self.guard = NULL_GUARD
        self.notes: list[str] = []
        self.bounded = False
        self.allocator = allocator
        self.cuda = cuda
        self.blocks = SimulatedBlocks(allocator, capture_function(stacks))
        self.scope = self.blocks.scope
        self.work = PhaseWork(self.phase_and_step)
        self.storages = Storages(self.blocks, self.work)
        self.kernels = KernelMemory(self.blocks)
        self._device = device
        self._running = False

    def start(self) -> None:
        """Begin to watch: module scopes, optimizers, storages that are resized."""
        if not self._running:
            self._running = True
            self.scope.start()
            self.blocks.region.start()
            self.storages.start()

    def stop(self) -> None:
        """Stop watching; what is alive stays alive in the snapshot."""
        if self._running:
            self._running = False
            self.scope.stop()
            self.blocks.region.stop()
            self.storages.stop()

    def see(self, func: Any, args: Args, kwargs: Kwargs, out: Any, alike: int | None = None) -> None:
        """Account for what an operation made, its kernel's own temporaries included.

        ``alike``: a number that only calls of this operation with arguments of the same shapes have.
        """
        storages, kernels = self.storages, self.kernels
        kernel_shown = self.cuda and not storages.paused
        early = kernels.before(func, args) if kernel_shown else []
        made = []
        if func is _EFFICIENT:  # the seed and offset of dropout stay on the host
            out = out[:2]
        for tensor in _fakes(out):
            if storages.knows(tensor):
                continue
            if not (self.cuda and _in_place(func, args) and storages.inherit(args[0], tensor)):
                storages.birth(tensor, func)
            made.append(tensor)
        kernels.multiply(func)  # the kernel has its result already
        if kernel_shown:
            kernels.after(Kernel(func, args, kwargs, made))
        for address in early:
            self.blocks.release(address)
        if kernel_shown:
            self.work.see(func, args, kwargs, out, alike)

    def phase_and_step(self) -> tuple[str, int | None]:
        """Return the phase that runs now and its step."""
        return self.blocks.tags.phase, self.blocks.tags.step

    # What a session asks of every recorder.

    def now_us(self) -> int:
        """Return the time: the count of events and marks so far, this one included."""
        self.blocks.trace.now += 1
        return self.blocks.trace.now

    def set_tags(self, tags: AllocationTags) -> None:
        self.blocks.tags = tags

    def watches(self, device_type: str) -> bool:
        return True

    def device(self) -> DeviceInfo:
        return self._device

    def oom(self) -> FailedRequest | None:
        failed = self.blocks.oom
        if failed is None:
            return None
        frames = frames_of([failed["captured"]], StackWriter(_OURS))[0]
        return FailedRequest(
            failed["requested_bytes"], failed["device_free_bytes"], stack_lines(frames), failed["time_us"]
        )

    def forget_oom(self) -> None:
        self.blocks.oom = None

    def open_window(self) -> None:
        self.blocks.windows.open()

    def close_window(self) -> WindowPeaks:
        allocated, reserved, active, requested = self.blocks.windows.close()
        heap = self.allocator
        peak, end = (reserved, heap.reserved) if self.cuda else (None, None)
        return WindowPeaks(allocated, peak, active, requested, heap.allocated, end)

    def dump(self) -> tuple[RawSnapshot, Recorded]:
        trace = self.blocks.trace
        raw = cast(RawSnapshot, trace.written(self._device.index, _OURS))
        return raw, Recorded(0, trace.now, History.COMPLETE.value, 0, None, [])


def _in_place(func: Any, args: tuple[Any, ...]) -> bool:
    """Tell whether the autograd engine adds or puts into the first argument, where a dispatch makes a new tensor."""
    return (func is _ADD and sums_in_place(args)) or (func is _PUT and puts_in_place())


def _fakes(value: Any) -> list[Any]:
    if isinstance(value, _FakeTensor):
        return [value] if value.layout is torch.strided and value.fake_device.type != "meta" else []
    return [fake for part in value for fake in _fakes(part)] if isinstance(value, (list, tuple)) else []
