"""Find what in the program still refers to the largest tensors without an owner.

An allocation that stays without being a parameter, a gradient or a state is somebody's list, attribute or
global. Python's collector knows who; asking costs a pass over all objects, so it is asked once, for a few
tensors, when a recording ends. Local variables are not asked about: reading a running frame's would keep
them alive, and so change the run; what only they hold has no holder here.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

_LEVELS = 4  # containers within containers
_MOST = 5  # holders named for one tensor


def largest_tensors(skip: Callable[[Any], bool], watches: Callable[[str], bool], top: int, at_least: int) -> list[Any]:
    """Return the ``top`` largest live tensors of at least so many bytes, one a storage; ``skip`` leaves some out."""
    import torch

    found: dict[int, Any] = {}
    for thing in gc.get_objects():
        # ``type`` and not ``isinstance``: that would run the ``__class__`` of any proxy in the program.
        if not issubclass(type(thing), torch.Tensor) or not watches(thing.device.type):
            continue
        try:
            storage = thing.untyped_storage()
            size, address = storage.nbytes(), storage.data_ptr()
        except Exception:  # sparse and wrapper tensors show no storage; subclasses raise what they like
            continue
        if size >= at_least and not skip(storage):
            found.setdefault(address, thing)
    return sorted(found.values(), key=lambda tensor: -int(tensor.untyped_storage().nbytes()))[:top]


def holders_of(thing: Any, *ours: object) -> list[str]:
    """Return where ``thing`` is held: ``MyCallback.history[3]``, ``train.cache['last']`` ...; ``ours`` do not count."""
    found: list[str] = []
    _collect(thing, {id(container) for container in ours}, "", 0, found)
    return sorted(set(found))[:_MOST]


# No generators or comprehensions below: their cells and frames would be found as holders.


def _collect(thing: Any, ours: set[int], suffix: str, level: int, found: list[str]) -> None:
    holders = gc.get_referrers(thing)
    # The list just made, and the one it was called with, are no holders of what is in them.
    ours = ours | {id(holders)}
    for holder in holders:
        kind = type(holder)
        if id(holder) in ours or issubclass(kind, (FrameType, ModuleType)):
            continue
        if issubclass(kind, dict):
            _through_dict(holder, thing, ours, suffix, level, found)
        elif issubclass(kind, (list, tuple, set, frozenset)):
            _up(holder, ours, f"[{_position(holder, thing)}]{suffix}", level, found)
        elif issubclass(kind, FunctionType):
            found.append(f"function {holder.__qualname__}{suffix}")
        elif issubclass(kind, CellType):
            found.append(f"a closure{suffix}")
        else:
            name = _key_of(getattr(holder, "__dict__", {}), thing)
            found.append(f"a {kind.__name__}{suffix}" if name is None else f"{kind.__name__}.{name}{suffix}")


def _through_dict(
    holder: dict[Any, Any], thing: Any, ours: set[int], suffix: str, level: int, found: list[str]
) -> None:
    key = _key_of(holder, thing)
    if key is None:
        return
    if holder.get("__spec__") is not None or "__builtins__" in holder:
        found.append(f"{holder.get('__name__', '?')}.{key}{suffix}")
        return
    for owner in gc.get_referrers(holder):
        if getattr(owner, "__dict__", None) is holder:
            found.append(f"{type(owner).__name__}.{key}{suffix}")
            return
    _up(holder, ours, f"[{key!r}]{suffix}", level, found)


def _up(holder: Any, ours: set[int], suffix: str, level: int, found: list[str]) -> None:
    before = len(found)
    if level + 1 < _LEVELS:
        _collect(holder, ours | {id(holder)}, suffix, level + 1, found)
    if len(found) == before:
        found.append(f"a {type(holder).__name__}{suffix}")


def _position(holder: Any, thing: Any) -> str:
    if isinstance(holder, (list, tuple)):
        for index, item in enumerate(holder):
            if item is thing:
                return str(index)
    return "..."


def _key_of(namespace: Any, thing: Any) -> str | None:
    for key, value in list(namespace.items()):
        if value is thing:
            return str(key)
    return None
