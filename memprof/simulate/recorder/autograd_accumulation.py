"""Tell the autograd engine's own sums of gradients from a program's additions: on CUDA they happen in place.

The engine adds a value's second gradient into the first if nothing else holds that one, but never under a dispatch
mode: there it makes a third tensor that CUDA does not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from memprof.compat import torch as torch_names

_FakeTensor: Any = torch_names.FAKE_TENSOR.get()
_graph_task: Any = torch_names.GRAPH_TASK.get()
_key_of: Callable[[Any], int] = attrgetter(torch_names.STORAGE_KEY.name)
_uses_of_storage: Any = torch_names.STORAGE_USES.get()
_uses_of_tensor: Any = torch_names.TENSOR_USES.get()
# Python code that stands between the engine and the operation it calls.
_PLUMBING = (torch_names.DISPATCH_MODE.module, type(torch.ops.aten.add.Tensor).__module__, "contextlib")
# References seen from inside a dispatch when the engine holds one: its own, the argument, its wrapper and the list.
_ALONE = 4
_ALONE_STORAGE = 2


def sums_in_place(args: tuple[Any, ...]) -> bool:
    """Tell whether an addition is the engine's own, of two gradients of one value, into one that it alone holds.

    Args:
        args: the arguments of ``aten.add.Tensor``, as a dispatch mode is given them.
    """
    if _graph_task() == -1 or torch.is_grad_enabled() or len(args) != 2:
        return False
    first, second = args
    if not isinstance(first, _FakeTensor) or not isinstance(second, _FakeTensor):
        return False
    if first.shape != second.shape or first.dtype != second.dtype or first.numel() == 0:
        return False
    return _called_by_engine() and _sole_owner(first)


def puts_in_place() -> bool:
    """Tell whether an ``index_put`` is the backward of indexing, which on CUDA writes into the zeros it just made."""
    return _graph_task() != -1 and not torch.is_grad_enabled() and _called_by_engine()


def _called_by_engine() -> bool:
    """Tell whether no Python code lies between the autograd engine and the operation being dispatched."""
    frame: Any = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("memprof.simulate"):
        frame = frame.f_back
    while frame is not None and frame.f_globals.get("__name__") in _PLUMBING:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == torch_names.ENGINE.name


def _sole_owner(tensor: Any) -> bool:
    """Tell whether the engine held the only reference to a gradient it is about to add to."""
    held: int = _uses_of_storage(_key_of(tensor.untyped_storage()))
    return bool(_uses_of_tensor(tensor) <= _ALONE and held <= _ALONE_STORAGE)
