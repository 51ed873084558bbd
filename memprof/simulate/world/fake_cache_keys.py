"""The fake mode's cache asked with cheaper keys.

torch's fake mode looks each operation up by what it is called with, and making that key takes about a quarter of a
simulation: a dataclass for every tensor, taken apart field by field. The same facts in one tuple find the same entry.
Anything but plain dense tensors and simple values goes torch's own way.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["quick_keys"]

_PARAMETERS = ["self", "result", "args", "state", "id_hashed_objects"]
_SIMPLE = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


def quick_keys() -> list[tuple[Any, str, Any]]:
    """What is to be replaced in torch while simulating; nothing where its releases differ."""
    original: Any = getattr(FakeTensorMode, "_prep_args_for_hash", None)
    if original is None or list(inspect.signature(original).parameters) != _PARAMETERS:
        return []

    def prepare(self: Any, result: list[Any], args: Any, state: Any, id_hashed_objects: list[Any]) -> None:
        kind = type(args)
        if kind is not tuple and kind is not list:
            original(self, result, args, state, id_hashed_objects)
            return
        result += (kind, len(args))
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor and arg.fake_mode is self and arg.constant is None and _is_plain(arg):
                result.append(_facts(arg))
            elif kind in _SIMPLE:
                result += (kind, arg)
            elif kind is list or kind is tuple:
                prepare(self, result, arg, state, id_hashed_objects)
            else:
                original(self, result, (arg,), state, id_hashed_objects)

    return [(FakeTensorMode, "_prep_args_for_hash", prepare)]


def _is_plain(tensor: Any) -> bool:
    return tensor.layout is torch.strided and not tensor._has_symbolic_sizes_strides


def _facts(tensor: Any) -> tuple[Any, ...]:
    """All that torch's ``TensorMetadata`` says of a dense tensor; its memory format follows from shape and strides."""
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.fake_device,
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.requires_grad,
        tensor.is_quantized,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
    )
