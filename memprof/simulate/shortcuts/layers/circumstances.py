"""List the circumstances of a layer's call that decide what it does, beside its modules and what it is given."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from memprof.compat import torch as torch_names
from memprof.simulate.recorder.recorder import FakeRecorder
from memprof.simulate.shortcuts.layers.structure import structure_of
from memprof.simulate.shortcuts.layers.values import Values

__all__ = ["known_by"]


def known_by(recorder: FakeRecorder, layer: nn.Module, given: Any, values: Values) -> tuple[tuple[str, ...], Any]:
    """Return the names of a layer's modules, and what its call is known by: all that decides what it does.

    Args:
        recorder: of the simulation.
        layer: the layer that is called.
        given: what it is called with, described.
        values: the tensors of that.

    Raises:
        NotAlike: a module has something that is not known to say all about itself.
    """
    names, roles = zip(*map(recorder.scope.name_of, layer.modules()), strict=True)
    claims = _claims_of(recorder, values.tensors)
    return names, (structure_of(layer, names[0]), given, claims, roles, *_modes(recorder), _where())


def _modes(recorder: FakeRecorder) -> tuple[Any, ...]:
    """List the modes that decide what operations do."""
    return (
        *recorder.circumstances(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu") and (torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
        len(torch_names.MODE_STACK.get()()),
    )


def _where() -> tuple[tuple[int, int], ...]:
    """Return the places in the code that are on the stack: what is made under the same has the same stack."""
    frame: Any = sys._getframe(1)
    found = []
    while frame is not None:
        found.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def _claims_of(recorder: FakeRecorder, tensors: Sequence[Any]) -> tuple[bool, ...]:
    """Tell of each tensor whether it was claimed."""
    owners = recorder.owners
    return tuple(owners is not None and owners.is_known(tensor.untyped_storage()) for tensor in tensors)
