"""Watch the threads that a program starts while it is recorded: a dispatch mode holds on one thread only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memprof.compat.optional_packages import RAW_THREAD_START, THREAD_START
from memprof.compat.patching import Patches
from memprof.recording.guard import Door
from memprof.recording.trace.dispatch_mode import Watching, remove_mode

# Nanoseconds of CPU time: a helper that wakes up, looks and sleeps again uses less.
_WORK = 1_000_000


class WorkerThreads:
    """Enter a mode on each thread that starts from now on, and leave it when the thread's work ends.

    The mode is entered below ``threading.Thread``, where all of Python's threads begin. A thread that outlives the
    recording keeps its mode until it ends; the mode then only passes operations on. Threads that ran before the
    recording can't be entered from another thread: :meth:`earlier` has those that worked during it.
    """

    def __init__(self, door: Door, make_mode: Callable[[], Watching | None]) -> None:
        self._door = door
        self._make_mode = make_mode
        self._patches = Patches()
        self._earlier: list[tuple[threading.Thread, int | None]] = []  # with their CPU time then

    def start(self) -> None:
        own = threading.current_thread()
        self._earlier = [(thread, _cpu_ns(thread)) for thread in threading.enumerate() if thread is not own]
        for target in (THREAD_START, RAW_THREAD_START):
            if starts := target.find():
                self._patches.put(*target.place(), self._door.changing(starts, self._with_mode))

    def stop(self) -> None:
        self._patches.restore()

    def earlier(self) -> list[tuple[str, bool]]:
        """Return the names of the threads that ran before the recording, and whether each may have worked during it:
        it used the CPU, or that is not known because it has ended or the system does not say."""
        found = []
        for thread, before in self._earlier:
            now = _cpu_ns(thread)
            found.append((thread.name, before is None or now is None or now - before > _WORK))
        return found

    def _with_mode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not args or not callable(args[0]):
            return args, kwargs
        return (self._door.around(args[0], self._enter, _leave), *args[1:]), kwargs

    def _enter(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Watching | None:
        mode = self._make_mode()
        if mode is not None:
            mode.__enter__()
        return mode


def _leave(mode: Watching | None, _result: Any, _error: BaseException | None) -> None:
    if mode is not None:
        remove_mode(mode)


def _cpu_ns(thread: threading.Thread) -> int | None:
    """Return the CPU time that a thread has used; None if it has ended, or on systems other than Linux."""
    try:
        return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
