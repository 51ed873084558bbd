"""Put functions of ours in place of other packages', and put everything back.

One mechanism, :class:`Patches`, serves all: :func:`patching` for a ``with`` block over targets, :func:`replacing` over
plain attributes, ``memprof.recording.guard.Seams`` for methods wrapped for as long as something is recorded.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from memprof.compat.targets import Missing, Target

_ABSENT = object()


class Patches:
    """Attributes that are replaced now, of objects, classes or modules.

    What is put back is what stood in the owner's own dictionary, a ``staticmethod`` or ``property`` as such; an
    attribute that the owner had inherited is deleted again.
    """

    def __init__(self) -> None:
        self._put: list[tuple[Any, str, Any, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``; Missing where there is no such attribute."""
        if not hasattr(owner, name):
            raise Missing(f"{getattr(owner, '__name__', type(owner).__name__)} has no {name}")
        previous = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._put.append((owner, name, value, previous))

    def restore(self, *, over: bool = False) -> None:
        """Put everything back, the last first; ``over``: also where somebody else has replaced our value since."""
        while self._put:
            owner, name, value, previous = self._put.pop()
            if not over and vars(owner).get(name, _ABSENT) is not value:
                continue
            if previous is not _ABSENT:
                setattr(owner, name, previous)
            elif name in vars(owner):
                delattr(owner, name)


@contextmanager
def replacing(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes ``(owner, name, value)`` inside a ``with`` block; where one is Missing, none."""
    patches = Patches()
    try:
        for owner, name, value in changes:
            patches.put(owner, name, value)
        yield
    finally:
        patches.restore(over=True)


@contextmanager
def patching(*changes: tuple[Target, Any]) -> Iterator[None]:
    """Replace targets inside a ``with`` block; optional ones that are not there are left out, needed ones are Missing,
    which ``require()`` of their feature says before."""
    places = [(target.place(), value) for target, value in changes if target.needed_by or target.find()]
    with replacing(*((owner, name, value) for (owner, name), value in places)):
        yield


def bind(instance: Any, target: Target, function: Callable[..., Any]) -> None:
    """Make ``function`` a method of one object in the target's place, for good; Missing where it has no such method."""
    if not callable(getattr(instance, target.name, None)):
        raise Missing(f"{type(instance).__name__} has no method {target.name}")
    setattr(instance, target.name, types.MethodType(function, instance))
