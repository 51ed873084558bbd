"""Find what in the program still refers to the largest tensors without an owner.

An allocation that stays without being a parameter, a gradient or a state is somebody's list, attribute or
global. Python's collector knows who; asking costs a pass over all objects, so it is asked once, for a few
tensors, when a recording ends. Local variables are not asked about: reading a running frame's would keep
them alive, and so change the run; what only they refer to has no holder here.

Searches go one after another: one would follow the lists of another that runs on a second thread, without an end.
A search visits a bounded number of objects, and reads attributes without running the program's code.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

from memprof.recording.guard import read_foreign
from memprof.recording.storages import is_tensor_type, of_types, storage_of

_LEVELS = 4  # containers within containers
_MOST_NAMED = 5  # holders named for one tensor
_MOST_VISITED = 50_000_000  # objects: a few seconds
_LONGEST_WAIT = 30.0  # seconds, for another thread's search
_SEARCHING = threading.RLock()
_PLAIN_KEYS = (str, int, float, bool, bytes, type(None))
_type_name: Callable[[type], str] = type.__dict__["__name__"].__get__  # a metaclass may have one of its own


class Holders(NamedTuple):
    """What refers to the largest tensors without an owner.

    Attributes:
        rows: the address of a tensor's storage, and the names of what refers to it.
        note: what the search has left out; None if it was complete.
    """

    rows: list[tuple[int, list[str]]]
    note: str | None


class _Search:
    """Count the objects that a search visits, and leave out its own containers."""

    def __init__(self) -> None:
        self.own: set[int] = {id(self.__dict__)}
        self.every = max(1, len(gc.get_objects()))  # objects that the collector visits to find one's referrers
        self.left = _MOST_VISITED

    @property
    def is_over(self) -> bool:
        return self.left < self.every


def find_holders(skip: Callable[[Any], bool], watches: Callable[[str], bool], top: int, at_least: int) -> Holders:
    """Find what refers to the ``top`` largest tensors of at least so many bytes; arguments as of
    :func:`largest_tensors`."""
    if not _SEARCHING.acquire(timeout=_LONGEST_WAIT):
        return Holders([], "what refers to the largest tensors was not searched: another recording was searching")
    try:
        search = _Search()
        tensors = largest_tensors(skip, watches, top, at_least)
        rows = []
        for tensor in tensors:
            if holders := holders_of(tensor, tensors, search=search):
                rows.append((int(storage_of(tensor).data_ptr()), holders))
        note = f"the search for what refers to the largest tensors ended after {_MOST_VISITED:,} objects"
        return Holders(rows, f"{note}: some references are not named" if search.is_over else None)
    finally:
        _SEARCHING.release()


def largest_tensors(skip: Callable[[Any], bool], watches: Callable[[str], bool], top: int, at_least: int) -> list[Any]:
    """Return the ``top`` largest live tensors of at least so many bytes, one a storage; ``skip`` leaves some out."""
    found: dict[int, tuple[int, Any]] = {}
    for thing in of_types(gc.get_objects(), is_tensor_type):
        if (storage := storage_of(thing)) is None or not watches(storage.device.type):
            continue
        try:
            size, address = storage.nbytes(), storage.data_ptr()
        except RuntimeError:  # of fake tensors
            continue
        if size >= at_least and not skip(storage):
            found.setdefault(address, (size, thing))
    largest = sorted(found.values(), key=lambda pair: -pair[0])[:top]
    return [tensor for _, tensor in largest]


def holders_of(thing: Any, *ours: object, search: _Search | None = None) -> list[str]:
    """Return where ``thing`` is held: ``MyCallback.history[3]``, ``train.cache['last']`` ...; ``ours`` do not count."""
    found: list[str] = []
    search = search or _Search()
    with _SEARCHING:
        _collect(thing, search, search.own | {id(container) for container in ours}, "", 0, found)
    return sorted(set(found))[:_MOST_NAMED]


# No generators or comprehensions below: their cells and frames would be found as holders.


def _collect(thing: Any, search: _Search, ours: set[int], suffix: str, level: int, found: list[str]) -> None:
    if search.is_over:
        return
    search.left -= search.every
    holders = gc.get_referrers(thing)
    # The list just made, and the one it was called with, are no holders of what is in them.
    ours = ours | {id(holders)}
    for holder in holders:
        kind = type(holder)
        if id(holder) in ours or issubclass(kind, (FrameType, ModuleType)):
            continue
        if issubclass(kind, dict):
            _through_dict(holder, thing, search, ours, suffix, level, found)
        elif issubclass(kind, (list, tuple, set, frozenset)):
            _up(holder, search, ours, f"[{_position(holder, thing)}]{suffix}", level, found)
        elif issubclass(kind, FunctionType):
            found.append(f"function {holder.__qualname__}{suffix}")
        elif issubclass(kind, CellType):
            found.append(f"a closure{suffix}")
        else:
            name = _key_of(_attributes(holder), thing)
            label = _type_name(kind)
            found.append(f"a {label}{suffix}" if name is None else f"{label}.{name}{suffix}")


def _through_dict(
    holder: dict[Any, Any], thing: Any, search: _Search, ours: set[int], suffix: str, level: int, found: list[str]
) -> None:
    key = _key_of(holder, thing)
    if key is None:
        return
    if dict.get(holder, "__spec__") is not None or dict.__contains__(holder, "__builtins__"):
        found.append(f"{dict.get(holder, '__name__', '?')}.{key}{suffix}")
        return
    if search.is_over:
        return
    search.left -= search.every
    for owner in gc.get_referrers(holder):
        if _attributes(owner) is holder:
            found.append(f"{_type_name(type(owner))}.{key}{suffix}")
            return
    _up(holder, search, ours, f"[{_shown(key)}]{suffix}", level, found)


def _up(holder: Any, search: _Search, ours: set[int], suffix: str, level: int, found: list[str]) -> None:
    before = len(found)
    if level + 1 < _LEVELS:
        _collect(holder, search, ours | {id(holder)}, suffix, level + 1, found)
    if len(found) == before:
        found.append(f"a {_type_name(type(holder))}{suffix}")


def _position(holder: Any, thing: Any) -> str:
    kind = list if isinstance(holder, list) else tuple if isinstance(holder, tuple) else None
    if kind is not None:
        for index, item in enumerate(kind.__iter__(holder)):
            if item is thing:
                return str(index)
    return "..."


def _attributes(holder: Any) -> Any:
    """Return an object's own attributes, without its class's ``__getattr__``; an empty dictionary if it has none."""
    return read_foreign(lambda: object.__getattribute__(holder, "__dict__"), {})


def _key_of(namespace: Any, thing: Any) -> Any:
    """Return the key of ``thing`` in a dictionary or in a class's attributes; None if it is not there."""
    items = dict.items(namespace) if isinstance(namespace, dict) else namespace.items()
    for key, value in list(items):
        if value is thing:
            return key
    return None


def _shown(key: Any) -> str:
    """Return a key as code writes it; of objects, whose ``__repr__`` is the program's, the class."""
    return repr(key) if type(key) in _PLAIN_KEYS else f"<{_type_name(type(key))}>"
