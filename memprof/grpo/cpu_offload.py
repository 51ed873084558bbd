"""Move the policy and the optimizer's state to pinned host memory while an engine in the same process generates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memprof.grpo.techniques.offload import HostPool


class WeightOffload:
    """Parks a model's parameters and an optimizer's state that are on ``device``; the host memory is kept for the next
    time.

    ``clear_cache`` gives cached blocks of the device back, so that another allocator can have them; ``parked_bytes`` is
    what is, or was last, on the host.
    """

    def __init__(self, device: torch.device, clear_cache: Callable[[], Any]) -> None:
        self._device, self._clear_cache = device, clear_cache
        self._host = HostPool(pin=device.type == "cuda")
        self.parked_bytes = 0

    @contextmanager
    def parked(self, model: Any, optimizer: Any) -> Iterator[None]:
        """Keep everything of ``model`` and ``optimizer`` on the host while open; the model cannot run then.

        The same tensors are given back, by identity and by value; what shares a storage shares it again.
        """
        device = self._device
        moved = [_Storage(group) for group in _by_storage(tensors_of(model, optimizer), device)]
        self.parked_bytes = sum(one.size for one in moved)
        try:
            for one in moved:
                one.leave(self._host)
            _synchronize(device)
            for one in moved:
                one.let_go()
            if device.type != "cpu":
                self._clear_cache()
            yield
        finally:
            for one in moved:
                one.come_back(device)
            _synchronize(device)
            for one in moved:
                one.give_back(self._host)


class _Storage:
    """Tensors over one storage of the device, and its copy on the host."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._views = [(t.size(), t.stride(), t.storage_offset(), t.dtype) for t in tensors]
        self._bytes: torch.Tensor | None = _whole(tensors[0])
        self._copy: torch.Tensor | None = None
        self._token: Any = None
        self.size = self._bytes.numel() if self._bytes is not None else 0

    def leave(self, host: HostPool) -> None:
        """Start the copy to the host."""
        assert self._bytes is not None
        self._copy, self._token = host.take(self.size)
        self._copy = self._copy[: self.size]
        self._copy.copy_(self._bytes, non_blocking=True)

    def let_go(self) -> None:
        """Point the tensors to the copy, so that the device's memory is free."""
        assert self._copy is not None
        self._point(self._copy)
        self._bytes = None

    def come_back(self, device: torch.device) -> None:
        """Copy to the device again, with what was written to the host meanwhile, and point the tensors there."""
        if self._copy is None or self._bytes is not None:
            return
        self._bytes = torch.empty(self.size, dtype=torch.uint8, device=device)
        self._bytes.copy_(self._copy, non_blocking=True)
        self._point(self._bytes)

    def give_back(self, host: HostPool) -> None:
        """Return the host's memory to the pool."""
        if self._token is not None:
            host.give(self._token)
        self._copy = self._token = None

    def _point(self, storage: torch.Tensor) -> None:
        for tensor, (size, stride, offset, dtype) in zip(self._tensors, self._views, strict=True):
            typed = storage[: self.size - self.size % dtype.itemsize].view(dtype)
            tensor.data = torch.as_strided(typed, size, stride, typed.storage_offset() + offset)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's whole storage as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def tensors_of(model: Any, optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield what a model's parameters and an optimizer's state are made of."""
    for parameter in model.parameters():
        yield from _with_memory(parameter)
    for state in getattr(optimizer, "state", {}).values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield from _with_memory(value)


def _with_memory(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return the tensors that hold what ``tensor`` is made of: torchao's moments are codes and scales."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _with_memory(getattr(tensor, name))


def _by_storage(tensors: Iterator[torch.Tensor], device: torch.device) -> list[list[torch.Tensor]]:
    found: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type == device.type and tensor.numel():
            group = found.setdefault(tensor.untyped_storage().data_ptr(), [])
            if not any(tensor is one for one in group):
                group.append(tensor)
    return list(found.values())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
