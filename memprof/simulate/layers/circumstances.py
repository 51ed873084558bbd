"""List the circumstances of a layer's call that decide what it does, beside its modules and what it is given."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from memprof.compat import torch as torch_names
from memprof.simulate.recorder.recorder import FakeRecorder

__all__ = ["claims_of", "modes", "where"]


def modes(recorder: FakeRecorder) -> tuple[Any, ...]:
    """List the modes that decide what operations do."""
    return (
        *recorder.circumstances(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu") and (torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
        len(torch_names.MODE_STACK.get()()),
    )


def where(above: str | None = None) -> tuple[tuple[int, int], ...]:
    """Return the places in the code that are on the stack: what is made under the same has the same stack.

    ``above``: only those that called the innermost function of this name.
    """
    frame: Any = sys._getframe(1)
    while above is not None and frame is not None and frame.f_code.co_name != above:
        frame = frame.f_back
    found = []
    while frame is not None:
        found.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def claims_of(recorder: FakeRecorder, tensors: Sequence[Any]) -> tuple[bool, ...]:
    """Tell of each tensor whether it was claimed."""
    owners = recorder.owners
    return tuple(owners is not None and owners.is_known(tensor.untyped_storage()) for tensor in tensors)
