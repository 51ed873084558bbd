"""Put functions of ours in place of other packages', and put everything back.

One mechanism, :class:`Patches`, serves all: :func:`patching` for a ``with`` block over targets, :func:`replacing` over
plain attributes, :class:`Seams` for methods of one object that are wrapped for as long as something is recorded.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from memprof.compat.targets import Missing, Target

__all__ = ["Patches", "Seams", "bind", "patching", "replacing"]

_ABSENT = object()

Enter = Callable[[tuple[Any, ...], dict[str, Any]], Any]
Leave = Callable[[Any, Any, "BaseException | None"], None]


class Patches:
    """Attributes that are replaced now, of objects, classes or modules.

    What is put back is what stood in the owner's own dictionary, a ``staticmethod`` or ``property`` as such; an
    attribute that the owner had inherited is deleted again.
    """

    def __init__(self) -> None:
        self._put: list[tuple[Any, str, Any, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``.

        Raises:
            Missing: there is no such attribute.
        """
        if not hasattr(owner, name):
            raise Missing(f"{getattr(owner, '__name__', type(owner).__name__)} has no {name}")
        previous = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._put.append((owner, name, value, previous))

    def restore(self, *, over: bool = False) -> None:
        """Put everything back, the last first.

        Args:
            over: also where somebody else has replaced our value since; otherwise theirs stays.
        """
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
    """Replace attributes ``(owner, name, value)`` inside a ``with`` block.

    Raises:
        Missing: an owner has no such attribute; nothing is replaced then.
    """
    patches = Patches()
    try:
        for owner, name, value in changes:
            patches.put(owner, name, value)
        yield
    finally:
        patches.restore(over=True)


@contextmanager
def patching(*changes: tuple[Target, Any]) -> Iterator[None]:
    """Replace targets inside a ``with`` block; optional ones that are not there are left out.

    Raises:
        Missing: a target some feature needs is not there; ``require()`` of that feature says so before.
    """
    places = [(target.place(), value) for target, value in changes if target.needed_by or target.find()]
    with replacing(*((owner, name, value) for (owner, name), value in places)):
        yield


def bind(instance: Any, target: Target, function: Callable[..., Any]) -> None:
    """Make ``function`` a method of one object in the target's place, for good.

    Raises:
        Missing: the object has no such method.
    """
    if not callable(getattr(instance, target.name, None)):
        raise Missing(f"{type(instance).__name__} has no method {target.name}")
    setattr(instance, target.name, types.MethodType(function, instance))


class Seams:
    """Methods that are wrapped now.

    A wrapper calls ``enter(args, kwargs)`` before and ``leave(token, result, error)`` after the original (``error``
    is what it raised, or None). Neither can hurt the run: what they raise goes to ``on_failure``, and the
    original's own result or exception passes through untouched. ``on_error`` hears of an exception that leaves the
    outermost wrapped method: the run is ending by it.
    """

    def __init__(self, on_failure: Callable[[BaseException], None], on_error: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._on_error = on_error
        self._patches = Patches()
        self._active = True
        self._depth = 0

    def wrap(self, owner: Any, name: str | Target, enter: Enter | None = None, leave: Leave | None = None) -> bool:
        """Wrap ``owner``'s method if there is one of that name; whether there was."""
        name = name if isinstance(name, str) else name.name
        original = getattr(owner, name, None)
        if not callable(original):
            return False
        self._patches.put(owner, name, self._wrapper(original, enter, leave))
        return True

    def restore(self) -> None:
        """Put the originals back. A wrapper somebody wrapped again in the meantime stays, and does nothing."""
        self._active = False
        self._patches.restore()

    def _wrapper(self, original: Any, enter: Enter | None, leave: Leave | None) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self._active:
                return original(*args, **kwargs)
            token = self._guarded(enter, args, kwargs)
            self._depth += 1
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                self._depth -= 1
                self._guarded(leave, token, None, error)
                if self._depth == 0:
                    self._guarded(self._on_error, error)
                raise
            self._depth -= 1
            self._guarded(leave, token, result, None)
            return result

        return wrapper

    def _guarded(self, step: Callable[..., Any] | None, *arguments: Any) -> Any:
        if step is None or not self._active:
            return None
        try:
            return step(*arguments)
        except Exception as error:
            self._on_failure(error)
            return None
