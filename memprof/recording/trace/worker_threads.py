"""Watch the threads that a program starts while it is recorded: a dispatch mode holds on one thread only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from memprof.compat.patching import Patches
from memprof.recording.guard import Door
from memprof.recording.trace.dispatch_mode import Watching, remove_mode


class WorkerThreads:
    """Enter a mode on each thread that starts from now on, and leave it when the thread's work ends.

    A thread that outlives the recording keeps its mode until it ends; the mode then only passes operations on.
    Threads that ran before the recording can't be entered from another thread: :attr:`running_before` has them.
    """

    def __init__(self, door: Door, make_mode: Callable[[], Watching | None]) -> None:
        self.running_before: list[threading.Thread] = []
        self._door = door
        self._make_mode = make_mode
        self._patches = Patches()

    def start(self) -> None:
        own = threading.current_thread()
        self.running_before = [thread for thread in threading.enumerate() if thread is not own]
        around = self._door.around(threading.Thread.start, self._before_start)
        self._patches.put(threading.Thread, "start", around)

    def stop(self) -> None:
        self._patches.restore()

    def _before_start(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        (thread,) = args

        def enter(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Watching | None:
            vars(thread).pop("run", None)  # else the thread would refer to itself
            mode = self._make_mode()
            if mode is not None:
                mode.__enter__()
            return mode

        thread.run = self._door.around(thread.run, enter, _leave)


def _leave(mode: Watching | None, _result: Any, _error: BaseException | None) -> None:
    if mode is not None:
        remove_mode(mode)
