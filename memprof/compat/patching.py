"""Put functions of ours in place of other packages', and put everything back.

One mechanism, :class:`Patches`, serves all: :func:`patching` for a ``with`` block over targets, :func:`replacing` over
plain attributes, ``memprof.recording.guard.MethodPatcher`` for methods wrapped for as long as something is recorded.
Whoever looked a method up before it was wrapped, as Ray does with an actor's, has the function of the class and never
looks at the attribute again: :meth:`Patches.redirect` changes what that function does.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from memprof.compat.targets import Missing, Target

_ABSENT = object()
_CODE = "__code__"


@dataclass(eq=False)
class _Patch:
    """Hold an attribute that is replaced now: by what, and what stood there before."""

    owner: Any
    name: str
    value: Any
    previous: Any

    @property
    def current(self) -> Any:
        return self.owner.__code__ if self.name == _CODE else vars(self.owner).get(self.name, _ABSENT)

    def lies_on(self, other: _Patch) -> bool:
        return self.owner is other.owner and self.name == other.name and self.previous is other.value

    def undo(self) -> None:
        previous = self.previous
        if previous is not _ABSENT:
            setattr(self.owner, self.name, previous)
        elif self.name in vars(self.owner):
            delattr(self.owner, self.name)


# Everything that is replaced now: recordings may overlap, and end in any order.
_in_place: weakref.WeakSet[_Patch] = weakref.WeakSet()


class Patches:
    """Attributes that are replaced now, of objects, classes or modules.

    What is put back is what stood in the owner's own dictionary, a ``staticmethod`` or ``property`` as such; an
    attribute that the owner had inherited is deleted again.
    """

    def __init__(self) -> None:
        self._put: list[_Patch] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``; Missing where there is no such attribute."""
        if not hasattr(owner, name):
            raise Missing(f"{getattr(owner, '__name__', type(owner).__name__)} has no {name}")
        previous = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._remember(_Patch(owner, name, value, previous))

    def redirect(self, function: types.FunctionType, instance: Any, wrapper: Callable[..., Any]) -> None:
        """Make ``function``, in place, call ``wrapper`` when its first argument is ``instance``.

        ``wrapper`` calls a :func:`copy_of` the function, and is a coroutine function if the function is one.
        """
        code = function.__code__
        redirection = _Redirection(copy_of(function), instance, wrapper)
        template = _awaiting if inspect.iscoroutinefunction(function) else _calling
        new = template.__code__.replace(
            co_consts=tuple(redirection if c == _PLACE else c for c in template.__code__.co_consts),
            co_freevars=code.co_freevars,
            co_name=code.co_name,
        )
        function.__code__ = new
        self._remember(_Patch(function, _CODE, new, code))
        if not hasattr(function, "__wrapped__"):  # where inspect.signature finds the arguments
            vars(function)["__wrapped__"] = redirection.original
            self._remember(_Patch(function, "__wrapped__", redirection.original, _ABSENT))

    def _remember(self, patch: _Patch) -> None:
        self._put.append(patch)
        _in_place.add(patch)

    def restore(self, *, over: bool = False) -> None:
        """Put everything back, the last first; ``over``: also where somebody else has replaced our value since.

        Where another of memprof's patches lies on top, that one puts back what stood here before.
        """
        while self._put:
            patch = self._put.pop()
            _in_place.discard(patch)
            above = next((p for p in _in_place if p.lies_on(patch)), None)
            if above is not None:
                above.previous = patch.previous
            elif over or patch.current is patch.value:
                patch.undo()


class _Redirection:
    """Choose between a function and its wrapper, by the first argument."""

    def __init__(self, original: types.FunctionType, instance: Any, wrapper: Callable[..., Any]) -> None:
        self.original = original
        self._wrapper = wrapper
        try:  # the class's function outlives the instance
            self._instance: Callable[[], Any] = weakref.ref(instance)
        except TypeError:
            self._instance = lambda: instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self._instance():
            return self._wrapper(*args, **kwargs)
        return self.original(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the function alone: a class that is sent to another process is not watched there."""
        return _itself, (self.original,)


def _itself(function: Any) -> Any:
    return function


# What a redirected function's code is: _PLACE stands for the redirection.
_PLACE = "memprof: the redirection"


def _calling(*args: Any, **kwargs: Any) -> Any:
    redirection: Any = "memprof: the redirection"
    return redirection(*args, **kwargs)


async def _awaiting(*args: Any, **kwargs: Any) -> Any:
    redirection: Any = "memprof: the redirection"
    return await redirection(*args, **kwargs)


def copy_of(function: types.FunctionType) -> types.FunctionType:
    """Return a function that does what ``function`` does now, whatever is put into that one later."""
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__, copy.__doc__, copy.__module__ = function.__qualname__, function.__doc__, function.__module__
    copy.__annotations__ = function.__annotations__
    vars(copy).update(vars(function))
    return copy


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
