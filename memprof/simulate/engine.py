"""What the autograd engine does on a device and not under a dispatch mode: it adds gradients up in place."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["sums_in_place"]

_ENGINE = "_engine_run_backward"
_PLUMBING = ("torch.utils._python_dispatch", "torch._ops", "contextlib")
# References seen from inside a dispatch when the engine holds one: its own, the argument, its wrapper and the list.
_ALONE = 4
_ALONE_STORAGE = 2


def sums_in_place(args: tuple[Any, ...]) -> bool:
    """Whether an addition is the engine's own, of two gradients of one value, into one that it alone holds.

    It writes into such a gradient, but never under a dispatch mode: there it makes a third tensor that CUDA does not.
    """
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled() or len(args) != 2:
        return False
    first, second = args
    if not isinstance(first, FakeTensor) or not isinstance(second, FakeTensor):
        return False
    if first.shape != second.shape or first.dtype != second.dtype or first.numel() == 0:
        return False
    return _called_by_engine() and _sole_owner(first)


def _called_by_engine() -> bool:
    """Whether no Python code lies between the autograd engine and the operation being dispatched."""
    frame: Any = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("memprof.simulate"):
        frame = frame.f_back
    while frame is not None and frame.f_globals.get("__name__") in _PLUMBING:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == _ENGINE


def _sole_owner(tensor: FakeTensor) -> bool:
    """Whether the engine held the only reference to a gradient it is about to add to."""
    any_tensor: Any = tensor
    held: int = torch._C._storage_Use_Count(any_tensor.untyped_storage()._cdata)
    return bool(any_tensor._use_count() <= _ALONE and held <= _ALONE_STORAGE)
