"""Find the storages behind a tensor, and tell one from another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from memprof.compat.torch import STORAGE_KEY

#: A number that is one storage's own for as long as it lives, whatever Python object stands for it.
storage_key: Callable[[Any], int] = attrgetter(STORAGE_KEY.name)


def storages_of(tensor: Any) -> Iterator[Any]:
    """Yield the real storages behind a tensor, those inside wrapper subclasses (DTensor, torchao) too."""
    import torch

    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten(tensor)[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):  # a DTensor names its mesh too
                yield from storages_of(inner)
        return
    if tensor.is_meta:
        return
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors have none of their own
        return
    yield storage
