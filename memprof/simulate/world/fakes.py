"""A world in which tensors have shapes and no values: torch's fake mode, and what must give way for it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memprof.simulate.world.attention import use_cuda_attention
from memprof.simulate.world.autocast import cuda_autocast
from memprof.simulate.world.fake_cache_keys import quick_keys

__all__ = ["as_fakes", "fake_world", "materialize", "patched"]


@contextmanager
def patched(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes replaced for a while: ``(object, name, value)``; missing ones are passed over."""
    saved: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in changes:
            if owner is not None and hasattr(owner, name):
                saved.append((owner, name, getattr(owner, name)))
                setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(saved):
            setattr(owner, name, value)


@contextmanager
def fake_world(*, cuda: bool = True, attention: str | None = None) -> Iterator[FakeTensorMode]:
    """Enter torch's fake mode, with CUDA's autocast and attention where ``cuda``.

    Garbage collection is off inside: storages must go when their last reference does, as they would on a device,
    and never in the middle of the allocator's own work.
    """
    with ExitStack() as stack:
        stack.enter_context(patched(*_changes(), *quick_keys()))
        if cuda:
            stack.enter_context(cuda_autocast())
            stack.enter_context(use_cuda_attention(attention))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()
        stack.callback(gc.enable if collecting else gc.disable)
        stack.enter_context(mode)
        yield mode


def _changes() -> list[tuple[Any, str, Any]]:
    changes: list[tuple[Any, str, Any]] = [(nn.Module, "_apply", _apply), (torch, "inference_mode", _inference_mode)]
    for name, module in list(sys.modules.items()):
        # transformers takes fake tensors for a graph being traced and leaves the eager path for them.
        if name.startswith("transformers.") and "is_tracing" in vars(module):
            changes.append((module, "is_tracing", _never))
    return changes


def _inference_mode(mode: Any = True) -> Any:
    """``no_grad`` in its place: it holds the same memory, and composite operations are still taken apart before a
    dispatch mode sees them."""
    if callable(mode):
        return torch.no_grad()(mode)
    return torch.no_grad() if mode else nullcontext()


def _never(*_: Any, **__: Any) -> bool:
    return False


def _apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """``Module._apply`` that swaps nothing: a tensor that changed is put in the old one's place."""
    if recurse:
        for child in self.children():
            child._apply(fn)  # type: ignore[no-untyped-call]
    for name, parameter in self._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            moved = fn(parameter)
        if moved is not parameter and not _same(moved, parameter):
            self._parameters[name] = nn.Parameter(moved, parameter.requires_grad)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata and one.dtype == other.dtype


def materialize(model: nn.Module, device: torch.device | None = None) -> None:
    """Give every parameter and buffer that is on ``meta`` a fake tensor of its own, tied ones the same."""
    where = device or torch.device("cpu")
    seen: dict[int, Any] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or tensor.device.type != "meta":
                    continue
                if id(tensor) not in seen:
                    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=where)
                    if isinstance(tensor, nn.Parameter):
                        made = nn.Parameter(made, tensor.requires_grad)
                    seen[id(tensor)] = (made, tensor)
                table[name] = seen[id(tensor)][0]


def as_fakes(model: nn.Module) -> None:
    """Give every parameter and buffer a fake tensor, tied ones the same; call it inside the fake world."""
    seen: dict[int, Any] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or isinstance(tensor, FakeTensor):
                    continue
                if id(tensor) not in seen:
                    made: Any = torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
                    if isinstance(tensor, nn.Parameter):
                        made = nn.Parameter(made, tensor.requires_grad)
                    seen[id(tensor)] = (made, tensor)
                table[name] = seen[id(tensor)][0]
