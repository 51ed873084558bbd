"""Watch the threads that a program starts while it is recorded: a dispatch mode holds on one thread only."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from memprof.compat.optional_packages import RAW_THREAD_START, THREAD_START, THREAD_TARGET
from memprof.compat.patching import Patches
from memprof.foreign import Args, Kwargs
from memprof.recording.guard import FailureGuard
from memprof.recording.trace.dispatch_mode import Watching, remove_mode

# Nanoseconds of CPU time: a helper that wakes up, looks and sleeps again uses less.
_WORK = 1_000_000
# Packages whose threads write or serve figures, or draw a progress bar, and run none of torch's operations. Threads of
# an executor are anybody's.
_LOGGERS = {
    "aim", "clearml", "codecarbon", "comet_ml", "dvclive", "memprof", "mlflow", "neptune", "prometheus_client",
    "sentry_sdk", "swanlab", "tensorboard", "tensorboardX", "tqdm", "trackio", "wandb",
}  # fmt: skip


class EarlierThread(NamedTuple):
    """Describe a thread that ran before the recording.

    Attributes:
        name: its name.
        may_have_worked: it used the CPU meanwhile, or that is not known because it has ended or the system does not
            say.
        is_logger: its code is a tracker's.
    """

    name: str
    may_have_worked: bool
    is_logger: bool


class _Earlier(NamedTuple):
    """Hold a thread that runs when the recording begins, with its CPU time then."""

    thread: threading.Thread
    is_logger: bool
    cpu_ns: int | None


class WorkerThreads:
    """Enter a mode on each thread that starts from now on, and leave it when the thread's work ends.

    The mode is entered below ``threading.Thread``, where all of Python's threads begin. On a thread that outlives the
    recording, the mode forgets the recording at its end, and leaves the thread's stack after the next operation there.
    Threads that ran before the recording can't be entered from another thread: :meth:`earlier` has those.
    """

    def __init__(self, guard: FailureGuard, make_mode: Callable[[], Watching | None]) -> None:
        self._guard = guard
        self._make_mode = make_mode
        self._patches = Patches()
        self._earlier: list[_Earlier] = []
        self._modes: weakref.WeakSet[Watching] = weakref.WeakSet()  # those on the threads' stacks
        self._entering = threading.Lock()

    def start(self) -> None:
        own = threading.current_thread()
        others = [thread for thread in threading.enumerate() if thread is not own]
        self._earlier = [_Earlier(thread, _is_logger(thread), _cpu_ns(thread)) for thread in others]
        for target in (THREAD_START, RAW_THREAD_START):
            if starts := target.find():
                self._patches.put(*target.place(), self._guard.changing(starts, self._with_mode))

    def stop(self) -> None:
        self._patches.restore()
        with self._entering:
            for mode in self._modes:
                mode.leave_later()

    def earlier(self) -> list[EarlierThread]:
        """Return the threads that ran before the recording."""
        found = []
        for thread, is_logger, before in self._earlier:
            now = _cpu_ns(thread)
            has_worked = before is None or now is None or now - before > _WORK
            found.append(EarlierThread(thread.name, has_worked, is_logger))
        return found

    def _with_mode(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if not args or not callable(args[0]):
            return args, kwargs
        # The thread may outlive the recording, and must not keep it alive.
        threads, guard = weakref.ref(self), FailureGuard(lost="what threads do that start while memprof records")

        def enter(_args: Args, _kwargs: Kwargs) -> Watching | None:
            these = threads()
            return None if these is None else these._guard(these._enter)

        return (guard.around(args[0], enter, _leave), *args[1:]), kwargs

    def _enter(self) -> Watching | None:
        with self._entering:
            if (mode := self._make_mode()) is not None:
                self._modes.add(mode)
        if mode is not None:
            mode.__enter__()
        return mode


def _leave(mode: Watching | None, _result: Any, _error: BaseException | None) -> None:
    if mode is not None:
        remove_mode(mode)


def _is_logger(thread: threading.Thread) -> bool:
    """Tell whether a thread runs a tracker's code: by its class, its target, or the object whose method that is."""
    target = getattr(thread, THREAD_TARGET.name, None)
    named = (type(thread), target, type(getattr(target, "__self__", None)))
    return any(str(getattr(one, "__module__", "")).partition(".")[0] in _LOGGERS for one in named)


def _cpu_ns(thread: threading.Thread) -> int | None:
    """Return the CPU time that a thread has used; None if it has ended, or on systems other than Linux."""
    try:
        return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
