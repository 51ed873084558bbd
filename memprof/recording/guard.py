"""Guard a run against memprof's own failures: everything that a run calls of memprof goes through a guard.

A failure of memprof never reaches the run. It closes the guard: one warning says what is lost, hooks are removed, and
every later call through the guard does nothing. The run's own results and exceptions pass unchanged.
``tests/recording/guard`` fails if a run can call something of memprof's that is not guarded.
"""

from __future__ import annotations

import functools
import inspect
import os
import signal
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from memprof.compat.patching import Patches, copy_of
from memprof.compat.targets import Target
from memprof.errors import MemprofError
from memprof.foreign import Args, Kwargs

Enter = Callable[[Args, Kwargs], Any]
Leave = Callable[[Any, Any, "BaseException | None"], None]

_ABSENT = object()
# Closes the guards of a child that the run forks.
_FORKED = RuntimeError("this process was forked from the run, whose recording is the parent's")
_F = TypeVar("_F", bound=Callable[..., Any])
_Error = TypeVar("_Error", bound=BaseException)
_T = TypeVar("_T")


def mark_user_error(error: _Error) -> _Error:
    """Mark an exception that is the run's, not memprof's: its pretended device is full."""
    error._memprof_meant = True  # type: ignore[attr-defined]
    return error


def as_warning(sentence: str, depth: int = 4) -> None:
    """Warn, of every recording and not of the first only, at the caller ``depth`` frames up; on stderr where warnings
    are errors."""
    try:
        caller = sys._getframe(depth)
        warnings.warn_explicit(sentence, UserWarning, caller.f_code.co_filename, caller.f_lineno)
    except RecursionError:
        raise
    except Exception:
        on_stderr(sentence)


def on_stderr(sentence: str) -> None:
    """Print for the person who runs the training; a closed or full stream ends nothing."""
    try:
        print(sentence, file=sys.stderr, flush=True)
    except RecursionError:
        raise
    except Exception:
        return


def _is_of_the_run(error: BaseException) -> bool:
    return not isinstance(error, Exception) or getattr(error, "_memprof_meant", False) or _raised_by_a_signal(error)


def _raised_by_a_signal(error: BaseException) -> bool:
    """Tell whether a signal's handler raised it, which the run has installed: a time limit of the run's, say, that
    passed while memprof worked."""
    if isinstance(error, RecursionError):
        return False  # nothing more can be called
    handlers = [handler for number in signal.valid_signals() if callable(handler := signal.getsignal(number))]
    codes = [getattr(h, "__code__", None) or getattr(type(h).__call__, "__code__", None) for h in handlers]
    step = error.__traceback__
    while step is not None and (step.tb_frame.f_code not in codes or step.tb_frame.f_code.co_filename == __file__):
        step = step.tb_next
    return step is not None


def read_foreign(read: Callable[[], _T], default: _T, failed: Callable[[str], object] | None = None) -> _T:
    """Return what ``read`` finds in the program's own objects; ``default`` if their code raises.

    Properties, ``__len__``, ``named_parameters`` and the like are the program's: what they raise does not end a
    recording. ``failed`` is called with a text of the exception.
    """
    try:
        return read()
    except Exception as error:
        if _is_of_the_run(error):
            raise
        if failed is not None:
            failed(error_text(error))
        return default


def error_text(error: BaseException) -> str:
    """Return an exception's ``repr``, or its class if that raises."""
    try:
        return repr(error)
    except Exception:
        return type(error).__name__


class FailureGuard:
    """Separate one recording, or one piece of its work, from the run.

    ``run`` (``training``, ``run``, ``loop``) and ``lost`` stand in the warning, which ``say`` takes; ``failure`` is
    the failure that closed the guard, None while it is open.
    """

    def __init__(
        self,
        run: str = "run",
        lost: str = "what this recording had not written yet",
        say: Callable[[str], None] = as_warning,
    ) -> None:
        self.failure: BaseException | None = None
        self._run, self._lost, self._say = run, lost, say
        self._undo: list[Callable[[], Any]] = []
        self._unsaid = False
        self._thread = threading.get_ident()

    def disable_in_forked_children(self) -> None:
        """Record nothing in children that the run forks from now on: the run, and what is recorded of it, are the
        parent's. A child has nothing to lose, so it is told nothing, and what it inherited is undone nowhere."""
        _leave_children_alone()
        _GUARDS.add(self)

    @property
    def forked(self) -> bool:
        """Tell whether this process is such a child."""
        return self.failure is _FORKED

    def leave(self) -> None:
        """Shut in a child."""
        self.failure, self._undo, self._unsaid = _FORKED, [], False

    def on_failure(self, undo: Callable[[], Any]) -> None:
        """Call ``undo`` when the guard has closed, on the thread that made it and outside operators; last first."""
        if undo not in self._undo:
            self._undo.append(undo)

    def forget(self, undo: Callable[[], Any]) -> None:
        """Drop an undo that has been done."""
        if undo in self._undo:
            self._undo.remove(undo)

    def __call__(self, step: Callable[..., Any] | None, *arguments: Any) -> Any:
        """Return what ``step(*arguments)`` returns; None where it fails or the guard is closed."""
        if step is None or self.failure is not None:
            self.run_pending_undo()
            return None
        try:
            return step(*arguments)
        except Exception as error:
            self.shut(error)
            self.run_pending_undo()
            return None

    def hook(self, step: Callable[..., Any], unseen: Callable[[], bool] | None = None) -> Callable[..., Any]:
        """Return the step as a hook that torch, Python or another package may call, anywhere; ``unseen`` tells whether
        a compiler traces the caller: the hook is not there then."""

        def hooked(*arguments: Any, **named: Any) -> Any:
            if (unseen is not None and unseen()) or self.failure is not None:
                return None
            try:
                return step(*arguments, **named)
            except Exception as error:
                self.shut(error)
                return None

        return hooked

    def around(
        self,
        original: Callable[..., Any],
        before: Callable[[Args, Kwargs], Any] | None = None,
        after: Callable[[Any, Any, BaseException | None], Any] | None = None,
        unseen: Callable[[], bool] | None = None,
    ) -> Callable[..., Any]:
        """Return a function for the place of ``original``, which is called in any case, with what the caller gave.

        ``before(args, kwargs)`` returns a token, ``after(token, result, error)`` gets what the original returned or
        raised; ``unseen`` as for :meth:`hook`. Of a coroutine function, ``after`` is called when it has been awaited.
        """
        if inspect.iscoroutinefunction(original):

            @functools.wraps(original)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                token = self(before, args, kwargs)
                try:
                    result = await original(*args, **kwargs)
                except BaseException as error:
                    self(after, token, None, error)
                    raise
                self(after, token, result, None)
                return result

            return awaited

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if unseen is not None and unseen():
                return original(*args, **kwargs)
            token = self(before, args, kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                self(after, token, None, error)
                raise
            self(after, token, result, None)
            return result

        return wrapper

    def changing(
        self, original: Callable[..., Any], change: Callable[..., tuple[Args, Kwargs]]
    ) -> Callable[..., Any]:
        """Return a function that calls ``original`` with what ``change(args, kwargs)`` makes of its arguments."""

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self(change, args, kwargs) or (args, kwargs)
            return original(*args, **kwargs)

        return wrapper

    def shut(self, error: BaseException) -> None:
        """Shut after a mistake of memprof's own, and say so once.

        Raises:
            BaseException: ``error``, if the run is to see it (:func:`mark_user_error`) or its signal handler raised it.
        """
        if _is_of_the_run(error):
            raise error
        if self.failure is not None:
            return
        self.failure, self._unsaid = error, True
        # Only its text is needed: its frames would keep what the run had there alive, for as long as the guard is.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        try:
            self._tell(error)
        except RecursionError:
            return  # :meth:`run_pending_undo` tells it, from where the run has called less

    def _tell(self, error: BaseException) -> None:
        try:
            self._say(self._sentence(error))
        except RecursionError:
            raise
        except Exception:
            on_stderr(f"memprof failed and stopped watching ({type(error).__name__}).")
        self._unsaid = False

    def run_all_cleanups(self, *steps: Callable[[], Any]) -> None:
        """Run every step of an end, whether or not others fail and whether or not the guard is closed."""
        theirs: list[BaseException] = []
        for step in steps:
            try:
                step()
            except Exception as error:
                try:
                    self.shut(error)
                except Exception as raised:
                    theirs.append(raised)
        if theirs:
            raise theirs[0]

    def run_pending_undo(self) -> None:
        """Undo what was wrapped, once the guard is closed, on its own thread; not in a hook, where torch is going
        through a list of hooks."""
        if self._unsaid and self.failure is not None:
            with suppress(RecursionError):
                self._tell(self.failure)
        if self._undo and self.failure is not None and threading.get_ident() == self._thread:
            undo, self._undo = self._undo, []
            self.run_all_cleanups(*reversed(undo))

    def _sentence(self, error: BaseException) -> str:
        if isinstance(error, MemprofError):
            return f"memprof does not watch this {self._run}, which goes on: {error} Lost: {self._lost}."
        run = self._run if self._run == "training" else f"the {self._run}"
        what = str(error) if isinstance(error, OSError) else error_text(error)  # the one names the file
        return f"memprof failed and stopped watching ({what}); {run} goes on. Lost: {self._lost}."


_GUARDS: weakref.WeakSet[FailureGuard] = weakref.WeakSet()


@functools.cache
def _leave_children_alone() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=FailureGuard().hook(_leave))


def _leave() -> None:
    for guard in _GUARDS:
        guard.leave()


class _Unguarded(FailureGuard):
    """Raise every failure: a simulation has no run to protect."""

    def shut(self, error: BaseException) -> None:
        raise error

    def on_failure(self, undo: Callable[[], Any]) -> None:
        pass

    def hook(self, step: Callable[..., Any], unseen: Callable[[], bool] | None = None) -> Callable[..., Any]:
        return step


NULL_GUARD: FailureGuard = _Unguarded()


def guarded(method: _F) -> _F:
    """Make a method one that a run may call: a failure in it closes ``self.guard``, and None is returned."""

    @functools.wraps(method)
    def entered(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.guard.forked:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.guard.shut(error)
            self.guard.run_pending_undo()
            return None

    return entered  # type: ignore[return-value]


def constructor(run: str) -> Callable[[_F], _F]:
    """Make ``__init__`` one that a script may call before its ``run``: a failure in it closes ``self.guard``, which is
    made here, and leaves the attributes that the class has. A user's mistake (:class:`MemprofError`, arguments that
    it does not take) is raised."""

    def wrapped(init: _F) -> _F:
        @functools.wraps(init)
        def made(self: Any, *args: Any, **kwargs: Any) -> None:
            self.guard = FailureGuard(run)
            try:
                init(self, *args, **kwargs)
            except MemprofError:
                raise
            except Exception as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is None:
                    raise  # nothing ran: these are not its arguments
                self.guard.shut(error)

        return made  # type: ignore[return-value]

    return wrapped


class MethodPatcher:
    """Hold the methods that are wrapped now.

    A wrapper calls ``enter(args, kwargs)`` before and ``leave(token, result, error)`` after the original (``error``
    is what it raised, or None), both guarded. ``on_error`` hears of an exception that leaves the outermost
    wrapped method: the run is ending by it.
    """

    def __init__(self, guard: FailureGuard, on_error: Callable[[BaseException], None]) -> None:
        self._guard = guard
        self._on_error = on_error
        self._patches = Patches()
        self._active = True
        self._depth = 0

    def wrap(
        self,
        owner: Any,
        name: str | Target,
        enter: Enter | None = None,
        leave: Leave | None = None,
        unseen: Callable[[], bool] | None = None,
    ) -> bool:
        """Wrap ``owner``'s method if it has one of that name, and return whether it has. ``unseen`` as for
        :meth:`FailureGuard.hook`:
        of calls for which it is true nothing is heard, exceptions included."""
        name = name if isinstance(name, str) else name.name
        original = getattr(owner, name, None)
        if not callable(original):
            return False
        self._patches.put(owner, name, self.around(original, enter, leave, unseen))
        return True

    def wrap_for_callers_of_the_class(self, instance: Any, name: str, enter: Enter, leave: Leave) -> bool:
        """Wrap as :meth:`wrap` does, so that those who call the class's function see it too; for ``instance`` alone."""
        function = inspect.getattr_static(type(instance), name, None)
        if name in getattr(instance, "__dict__", ()) or not isinstance(function, types.FunctionType):
            return self.wrap(instance, name, enter, leave)
        self._patches.redirect(function, instance, self.around(copy_of(function), enter, leave))
        return True

    def around(
        self,
        original: Callable[..., Any],
        enter: Enter | None,
        leave: Leave | None,
        unseen: Callable[[], bool] | None = None,
    ) -> Callable[..., Any]:
        """Return what :meth:`wrap` puts in the place of ``original``."""

        def before(args: Args, kwargs: Kwargs) -> Any:
            if not self._active:
                return _ABSENT
            self._depth += 1
            try:
                return enter(args, kwargs) if enter is not None else None
            except BaseException as error:
                self._depth -= 1
                self._interrupted(error)
                raise

        def after(token: Any, result: Any, error: BaseException | None) -> None:
            if token is _ABSENT or not self._active:
                return
            self._depth -= 1
            try:
                if leave is not None:
                    leave(token, result, error)
            except BaseException as interrupt:
                self._interrupted(interrupt)
                raise
            if error is not None and self._depth == 0 and self._active:
                self._on_error(error)

        return self._guard.around(original, before, after, unseen)

    def _interrupted(self, error: BaseException) -> None:
        """Tell ``on_error`` of a Ctrl-C, or another exception of the run's, that comes while memprof works."""
        if self._depth == 0 and self._active and _is_of_the_run(error):
            self._on_error(error)

    def restore(self) -> None:
        """Put the originals back. A wrapper somebody wrapped again in the meantime stays, and does nothing."""
        self._active = False
        self._patches.restore()
