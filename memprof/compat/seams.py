"""Wrapping methods of one object for a while, as instance attributes, and putting everything back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["Seams"]

_ABSENT = object()

Enter = Callable[[tuple[Any, ...], dict[str, Any]], Any]
Leave = Callable[[Any, Any, "BaseException | None"], None]


class Seams:
    """Methods that are wrapped now.

    A wrapper calls ``enter(args, kwargs)`` before and ``leave(token, result, error)`` after the original (``error``
    is what it raised, or None). Neither can hurt the run: what they raise goes to ``on_failure``, and the
    original's own result or exception passes through untouched. ``on_error`` hears of an exception that leaves the
    outermost wrapped method: the run is ending by it.
    """

    def __init__(
        self, on_failure: Callable[[BaseException], None], on_error: Callable[[BaseException], None]
    ) -> None:
        self._on_failure = on_failure
        self._on_error = on_error
        self._wrapped: list[tuple[Any, str, Any, Any]] = []
        self._active = True
        self._depth = 0

    def wrap(self, owner: Any, name: str, enter: Enter | None = None, leave: Leave | None = None) -> bool:
        """Wrap ``owner.name`` if there is such a method; whether there was."""
        original = getattr(owner, name, None)
        if not callable(original):
            return False
        wrapper = self._wrapper(original, enter, leave)
        previous = vars(owner).get(name, _ABSENT)
        setattr(owner, name, wrapper)
        self._wrapped.append((owner, name, wrapper, previous))
        return True

    def restore(self) -> None:
        """Put the originals back. A wrapper somebody wrapped again in the meantime stays, and does nothing."""
        self._active = False
        for owner, name, wrapper, previous in reversed(self._wrapped):
            if vars(owner).get(name) is not wrapper:
                continue
            if previous is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, previous)
        self._wrapped = []

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
