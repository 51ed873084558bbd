"""Know a layer by what its modules are: two layers of the same structure do the same for inputs of the same facts."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from memprof.compat.torch import AFTER_HOOKS, BEFORE_HOOKS
from memprof.compat.torch_sharding import CONTRACT_REGISTRY, CONTRACT_STATE
from memprof.simulate.shortcuts.layers.values import NotAlike
from memprof.simulate.shortcuts.results import SIMPLE

__all__ = ["cache_index", "structure_of"]

#: Attributes that say which of the layers a module belongs to.
_INDEX = {"layer_idx", "layer_id", "layer_index", "layer_number"}
_DEPTH = 4  # of containers and functions inside one another


def structure_of(layer: nn.Module, own_name: str) -> tuple[Any, ...]:
    """List what a layer's modules are, by name: types, attributes, parameters' shapes, functions in their place.

    ``own_name`` may be part of texts among the attributes, and tells nothing.

    Raises:
        NotAlike: a module inside has hooks, which may do more than the layer does.
    """
    found: list[Any] = []
    sharding = {CONTRACT_STATE.find(), CONTRACT_REGISTRY.find()} if CONTRACT_STATE.is_loaded else set()
    for name, module in layer.named_modules():
        found += (name, type(module))
        found += map(_tensor_facts, module.named_parameters(recurse=False))
        found += map(_tensor_facts, module.named_buffers(recurse=False))
        if module is not layer and (BEFORE_HOOKS.of(module) or AFTER_HOOKS.of(module)):
            raise NotAlike(f"{name} has hooks")
        for key, value in vars(module).items():
            if not (key in _OWN or key in _INDEX or (module is layer and (key == "forward" or key in sharding))):
                found += (key, _facts(value, _DEPTH, own_name + "."))
    return tuple(found)


_OWN = set(vars(nn.Module())) - {"training"}


def _tensor_facts(entry: tuple[str, Any]) -> tuple[Any, ...]:
    name, tensor = entry
    placed = getattr(tensor, "placements", None)
    return (name, type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad, placed)


def _facts(value: Any, depth: int, own_name: str) -> Any:
    kind = type(value)
    if kind is str:
        return value.replace(own_name, "?.")
    if kind in SIMPLE:
        return (kind, value)
    if isinstance(value, nn.Module):
        return kind
    if isinstance(value, torch.Tensor):
        return _tensor_facts(("", value))
    if depth:
        for known, parts in _PARTS:
            if isinstance(value, known):
                return (kind, tuple(_facts(part, depth - 1, own_name) for part in parts(value)))
    return (kind, id(value))


def _of_function(function: Any) -> Iterator[Any]:
    yield function.__code__
    yield function.__defaults__
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            yield None


def _of_dict(values: dict[Any, Any]) -> Iterator[Any]:
    for name, value in values.items():
        yield name
        yield value


_PARTS: list[tuple[Any, Callable[[Any], Any]]] = [
    ((list, tuple), iter),
    ((set, frozenset), lambda values: sorted(values, key=repr)),
    (dict, _of_dict),
    (weakref.ref, lambda reference: (reference(),)),
    (types.FunctionType, _of_function),
    (types.MethodType, lambda method: (method.__func__, type(method.__self__))),
    (partial, lambda made: (made.func, made.args, made.keywords)),
]


def cache_index(layer: nn.Module) -> int:
    """Return which of a cache's layers is this layer's.

    Raises:
        NotAlike: its modules do not say, or not the same.
    """
    found = {vars(module)["layer_idx"] for module in layer.modules() if "layer_idx" in vars(module)}
    if len(found) != 1 or type(index := found.pop()) is not int:
        raise NotAlike("which layer of the cache it uses is not known")
    return index
