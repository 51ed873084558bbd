"""Ask the fake mode's cache with cheaper keys.

torch's fake mode looks each operation up by what it is called with, and making that key takes about a quarter of a
simulation: a dataclass for every tensor, taken apart field by field. The same facts in one tuple find the same entry.
Anything but plain dense tensors and simple values goes torch's own way.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch

from memprof.compat import torch as torch_names
from memprof.compat.check import fault_of
from memprof.compat.targets import Target

__all__ = ["SIMPLE", "facts_of", "is_plain", "quick_keys"]

_FakeTensor: Any = torch_names.FAKE_TENSOR.get()
_is_symbolic = attrgetter(torch_names.FAKE_SYMBOLIC.name)
#: Types of arguments that are their own facts.
SIMPLE = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


def quick_keys() -> list[tuple[Target, Any]]:
    """List what is to be replaced in torch while simulating: nothing where its release differs, which costs time."""
    if fault_of(torch_names.FAKE_KEYS) or fault_of(torch_names.FAKE_SYMBOLIC):
        return []
    original: Any = torch_names.FAKE_KEYS.get()

    def prepare(self: Any, result: list[Any], args: Any, state: Any, id_hashed_objects: list[Any]) -> None:
        kind = type(args)
        if kind is not tuple and kind is not list:
            original(self, result, args, state, id_hashed_objects)
            return
        result += (kind, len(args))
        for arg in args:
            kind = type(arg)
            if kind is _FakeTensor and arg.fake_mode is self and arg.constant is None and is_plain(arg):
                result.append(facts_of(arg))
            elif kind in SIMPLE:
                result += (kind, arg)
            elif kind is list or kind is tuple:
                prepare(self, result, arg, state, id_hashed_objects)
            else:
                original(self, result, (arg,), state, id_hashed_objects)

    return [(torch_names.FAKE_KEYS, prepare)]


def is_plain(tensor: Any) -> bool:
    """Tell whether a tensor is dense, and its shape plain numbers."""
    return tensor.layout is torch.strided and not _is_symbolic(tensor)


def facts_of(tensor: Any) -> tuple[Any, ...]:
    """List all that torch's ``TensorMetadata`` says of a dense tensor; shape and strides give its memory format."""
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
