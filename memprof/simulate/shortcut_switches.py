"""Find the shortcuts that a simulation may take: none of them is needed, and each can be switched off.

What is simulated without them is the truth; a shortcut equals it to the byte, or is not taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from importlib import import_module
from typing import Any

_ROOM = "memprof.simulate.shortcuts"
#: What each leaves out, and its module in :mod:`memprof.simulate.shortcuts`.
SHORTCUTS = {
    "depth": "depth.run",  # layers of a deep model that repeat those of shallow ones
    "decoding": "decoding.learning",  # the steps of a generation between the first and the last ones
    "results": "results",  # operations whose result is known
    "rounds": "rounds",  # tiles and chunks that do what the one before did
    "native": "native",  # the allocator's model in Python
    "micro_batches": "micro_batches",  # of searches: micro-batches between the third and the last
}
_off: ContextVar[frozenset[str]] = ContextVar("_off", default=frozenset())
_broken: dict[str, str] = {}  # why a shortcut could not be loaded, by its name


def shortcut(name: str) -> Any:
    """Return the module of a shortcut; None where it is switched off, not there or cannot be loaded."""
    _broken.pop(name, None)
    if name in _off.get():
        return None
    module = f"{_ROOM}.{SHORTCUTS[name]}"
    try:
        return import_module(module)
    except Exception as error:
        if not (isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")):
            _broken[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"
        return None


def unloaded() -> list[str]:
    """Say which of the shortcuts asked for are there and cannot be loaded."""
    return [f"simulated without the shortcut {name!r} ({why}); please report it." for name, why in _broken.items()]


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Switch these shortcuts off while open."""
    token = _off.set(_off.get().union(names))
    try:
        yield
    finally:
        _off.reset(token)
