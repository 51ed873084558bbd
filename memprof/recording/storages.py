"""Find the storages behind a tensor, and tell one from another.

Tensors belong to the program, whose subclasses may put anything in the place of torch's attributes. What is read of one
here is torch's own, inside :func:`without_overrides`, so that reading runs none of the program's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from itertools import compress
from operator import attrgetter
from typing import Any

from memprof.compat.torch import NO_FUNCTIONS, STORAGE_KEY
from memprof.recording.guard import read_foreign

#: A number that is one storage's own for as long as it lives, whatever Python object stands for it.
storage_key: Callable[[Any], int] = attrgetter(STORAGE_KEY.name)


def without_overrides() -> AbstractContextManager[None]:
    """Return a context in which torch's functions do not call the ``__torch_function__`` of subclasses."""
    return _context()()


@cache
def _context() -> Callable[[], AbstractContextManager[None]]:
    context: Callable[[], AbstractContextManager[None]] = NO_FUNCTIONS.get()
    return context


def is_tensor(thing: object) -> bool:
    """Tell whether an object is a tensor by its type: ``isinstance`` would run the ``__class__`` of any proxy."""
    return is_tensor_type(type(thing))


def is_tensor_type(kind: type) -> bool:
    import torch

    return issubclass(kind, torch.Tensor)


def of_types(things: list[Any], is_wanted: Callable[[type], bool]) -> Iterator[Any]:
    """Return the objects whose type is wanted; asks once a type, and runs no code of the objects or their types."""
    kinds = dict(zip(map(id, map(type, things)), map(type, things), strict=True))
    wanted = {number for number, kind in kinds.items() if is_wanted(kind)}
    return compress(things, map(wanted.__contains__, map(id, map(type, things))))


def storage_of(tensor: Any) -> Any:
    """Return a tensor's storage, or None: sparse tensors and most wrappers have none of their own."""
    import torch

    with without_overrides():
        try:
            return torch.Tensor.untyped_storage(tensor)
        except (NotImplementedError, RuntimeError):
            return None


def gradient_of(tensor: Any) -> Any:
    """Return the gradient of a leaf; None of another tensor, of which torch warns."""
    import torch

    torchs: Any = torch.Tensor
    with without_overrides():
        try:
            return torchs.grad.__get__(tensor) if torchs.is_leaf.__get__(tensor) else None
        except RuntimeError:
            return None


def storages_of(tensor: Any) -> Iterator[Any]:
    """Yield the real storages behind a tensor, those inside wrapper subclasses (DTensor, torchao) too."""
    import torch

    if not is_tensor(tensor):  # what a program's own named_parameters() may yield
        return
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is not None:
        # Its names are the subclass's own code, and so may be the attributes.
        nothing: list[Any] = []
        inner = read_foreign(lambda: [getattr(tensor, name) for name in flatten(tensor)[0]], nothing)
        for part in inner:
            if is_tensor(part):  # a DTensor names its mesh too
                yield from storages_of(part)
        return
    torchs: Any = torch.Tensor
    with without_overrides():
        is_meta = torchs.is_meta.__get__(tensor)
    if not is_meta and (storage := storage_of(tensor)) is not None:
        yield storage
