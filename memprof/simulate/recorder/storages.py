"""Follow fake storages: each takes memory when an operation makes it, and gives it back when nothing refers to it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch

from memprof.compat import torch as torch_names
from memprof.compat.patching import Patches
from memprof.simulate.recorder.blocks import SimulatedBlocks
from memprof.simulate.recorder.flops import PhaseWork
from memprof.simulate.recorder.host_memory import PinnedHostAllocator

# In place of an address: host memory, which is counted and has no events; memory that is held in another way.
_HOST, _ELSEWHERE = -1, -2
_key_of: Callable[[Any], int] = attrgetter(torch_names.STORAGE_KEY.name)


class _Watch(weakref.ref):  # type: ignore[type-arg]
    """Refer weakly to a storage, and still know its block."""

    __slots__ = ("address", "key", "nbytes")
    key: int
    address: int
    nbytes: int


class Storages:
    """Know the storages that are alive, and their blocks.

    While ``paused`` is not 0, what is made takes no memory; :meth:`on_host` takes that of the ``host``.
    """

    def __init__(self, blocks: SimulatedBlocks, work: PhaseWork) -> None:
        self.host = PinnedHostAllocator()
        self.paused = 0
        self._blocks, self._work = blocks, work
        self._live: dict[int, _Watch] = {}
        self._on_host = 0
        self._patches = Patches()
        self._running = False

    def start(self) -> None:
        """Begin to follow, through resizing too."""
        self._running = True
        original, storages = torch_names.STORAGE_RESIZE.get(), self

        def resize_(self: torch.UntypedStorage, size: int) -> Any:
            result = original(self, size)
            if storages._running and not storages.paused and self.device.type == "meta":
                watch = storages._live.get(_key_of(self))
                if (watch.nbytes if watch else 0) != self.nbytes():
                    storages._resized(self)
            return result

        self._patches.put(*torch_names.STORAGE_RESIZE.place(), resize_)

    def stop(self) -> None:
        """Stop; what is alive stays alive in the snapshot."""
        self._running = False
        self._patches.restore()

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Let what is made inside take no memory."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Count what is made inside as pinned host memory, not the device's, for as long as it lives."""
        self._on_host += 1
        try:
            yield
        finally:
            self._on_host -= 1

    def address_of(self, storage: Any) -> int:
        """Return the simulated address of a storage; 0 if it has none."""
        watch = self._live.get(_key_of(storage))
        return watch.address if watch is not None and watch.address > 0 else 0

    def watch_at(self, address: int) -> Any:
        """Return what stands for the storage at ``address``, None if nothing does; its ``address`` may be changed."""
        return next((watch for watch in self._live.values() if watch.address == address), None)

    def knows(self, tensor: Any) -> bool:
        """Tell whether a tensor's storage is followed; what was resized meanwhile takes other memory."""
        storage = tensor.untyped_storage()
        watch = self._live.get(_key_of(storage))
        if watch is not None and watch.nbytes != storage.nbytes() and not self.paused:
            self._resized(storage)
        return watch is not None

    def birth(self, tensor: torch.Tensor, func: Any = None) -> None:
        """Take memory for a tensor's storage, unless it is known already."""
        if _key_of(tensor.untyped_storage()) not in self._live:
            self._born(tensor.untyped_storage(), tuple(tensor.shape), tensor.dtype, func)

    def inherit(self, old: Any, tensor: torch.Tensor) -> bool:
        """Let a tensor take over the block of an old one; tell whether that has one of this size."""
        storage: Any = tensor.untyped_storage()
        watch = self._live.get(_key_of(old.untyped_storage()))
        if watch is None or watch.nbytes != storage.nbytes():
            return False
        del self._live[watch.key]
        self._remember(storage, watch.address, watch.nbytes)
        return True

    def take_away(self, tensor: torch.Tensor) -> None:
        """Give back the memory of a tensor that lives on elsewhere, until :meth:`birth` takes memory for it again."""
        watch = self._live.pop(_key_of(tensor.untyped_storage()), None)
        if watch is not None:
            self._give_back(watch)

    def disown(self, tensor: torch.Tensor) -> None:
        """Give back the memory of a tensor that is accounted for elsewhere (by :meth:`Blocks.hold`), for good."""
        self.take_away(tensor)
        storage: Any = tensor.untyped_storage()
        self._remember(storage, _ELSEWHERE, storage.nbytes())

    def _born(self, storage: Any, shape: tuple[int, ...], dtype: torch.dtype, func: Any) -> None:
        nbytes = storage.nbytes()
        if not nbytes or self.paused:
            return
        address = _HOST
        if self._on_host:
            self._blocks.beyond_device()
            self.host.malloc(nbytes)
            self._work.to_host(2 * nbytes)  # there, and back
        else:
            address = self._blocks.make(nbytes, shape, dtype, func)
        self._remember(storage, address, nbytes)

    def _resized(self, storage: Any) -> None:
        watch = self._live.pop(_key_of(storage), None)
        if watch is not None:
            self._give_back(watch)
        if storage.nbytes():
            self._born(storage, (storage.nbytes(),), torch.uint8, None)

    def _remember(self, storage: Any, address: int, nbytes: int) -> None:
        watch = _Watch(storage, self._died)
        watch.key, watch.address, watch.nbytes = _key_of(storage), address, nbytes
        self._live[watch.key] = watch

    def _died(self, watch: Any) -> None:
        known: Any = self._live.get(watch.key)
        if self._running and known is watch:
            del self._live[watch.key]
            self._give_back(watch)

    def _give_back(self, watch: _Watch) -> None:
        if watch.address == _HOST:
            self._blocks.beyond_device()
            self.host.free(watch.nbytes)
        elif watch.address != _ELSEWHERE:
            self._blocks.release(watch.address)
