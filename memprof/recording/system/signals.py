"""Handle the signals that end a process: write what was recorded first.

An exception unwinds and is met on its way. A SIGTERM does not: by default the process is gone at once. While a run is
watched, and only where the program has no handler of its own, the signal writes what there is and then does what it
would have done: the process still dies by it. A second one ends it on the spot.

Python runs its handlers between two steps of the main thread, which may be waiting for a dead rank inside a
collective and never come back. So a thread listens too; what it cannot leave to the main thread it does itself.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from memprof.recording.guard import Door, way_in

# How long the main thread may take to notice a signal before it counts as stuck.
_PATIENCE_S = 2.0
_LOOKS = 20
# The ends of our pipes that Python writes signals to.
_OURS: set[int] = set()


class Interrupts:
    """Delay a Ctrl-C in the block to its end, so that a dump is finished; a second one is not delayed.

    Only Python's own handler is put off, on the main thread. Whoever uses the block raises what is ``pending``, or
    knows that an interrupt is on its way already.
    """

    def __init__(self) -> None:
        self.pending = False
        self._previous: Any = None
        self.door = Door(lost="nothing: an interrupt is not put off")
        self._handler = self.door.hook(self._wait)

    @way_in
    def __enter__(self) -> Interrupts:
        if _main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous = signal.signal(signal.SIGINT, self._handler)
        return self

    @way_in
    def __exit__(self, *_: object) -> None:
        if self._previous is not None and signal.getsignal(signal.SIGINT) is self._handler:
            signal.signal(signal.SIGINT, self._previous)

    def _wait(self, number: int, frame: FrameType | None) -> None:
        if self.pending:
            raise KeyboardInterrupt
        self.pending = True


class Terminations:
    """Call ``rescue``, which writes what there is, once on a SIGTERM that has no handler, then let the process die by
    it."""

    def __init__(self, rescue: Callable[[], None]) -> None:
        self._rescue = rescue
        self.door = Door(lost="what was recorded until this signal")
        self._handler = self.door.hook(self._caught)
        self._owner = os.getpid()
        self._begun = threading.Event()
        self._once = threading.Lock()
        self._installed = False
        self._finishing = self._pending = False
        self._pipe: tuple[int, int] | None = None

    @way_in
    def start(self) -> None:
        """Begin to listen, where that is possible and nobody else does."""
        if not _main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        signal.signal(signal.SIGTERM, self._handler)
        self._installed = True
        Door(lost="what is recorded until a signal ends a program that is stuck in one call")(self._listen)

    @way_in
    def stop(self) -> None:
        """Put everything back."""
        if not self._installed or not _main_thread():
            return
        self._installed = False
        if signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._pipe is not None:
            if (now := signal.set_wakeup_fd(-1)) not in (-1, self._pipe[1]):
                signal.set_wakeup_fd(now)  # somebody else's by now
            _OURS.discard(self._pipe[1])
            os.close(self._pipe[1])  # the thread reads the end of it, closes its own and leaves
            self._pipe = None

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Finish what the block writes: delay a signal to the block's end. A second one is not delayed."""
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False
            if self._pending:
                os.kill(os.getpid(), signal.SIGTERM)

    def _listen(self) -> None:
        read, write = os.pipe()
        os.set_blocking(write, False)
        if (other := signal.set_wakeup_fd(write, warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(other)
            os.close(read)
            os.close(write)
            return
        self._pipe = (read, write)
        _OURS.add(write)
        _leave_children_alone()
        threading.Thread(target=self.door.hook(self._wait), args=(read,), name="memprof-signals", daemon=True).start()

    def _caught(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal on the main thread, between two steps of the program."""
        self._begun.set()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._finishing:
            self._pending = True
            return
        try:
            self._save()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def _wait(self, read: int) -> None:
        """Handle a signal on the listening thread: a byte is a signal's number."""
        while data := _read(read):
            if signal.SIGTERM not in data or os.getpid() != self._owner:
                continue
            if self._begun.wait(_PATIENCE_S) or not _stuck():
                continue
            self._begun.set()
            # Dying by the signal is C's to do: Python lets only its main thread change a handler.
            ctypes.pythonapi.PyOS_setsig.restype = ctypes.c_void_p
            ctypes.pythonapi.PyOS_setsig(int(signal.SIGTERM), ctypes.c_void_p(0))
            self._save()
            os.kill(os.getpid(), signal.SIGTERM)
        os.close(read)

    def _save(self) -> None:
        # A forked worker inherits the handler, but the run is its parent's.
        if os.getpid() == self._owner and self._once.acquire(blocking=False):
            self.door.tidy(self._rescue, sys.stdout.flush, sys.stderr.flush)


@functools.cache
def _leave_children_alone() -> None:
    """Forget the pipe in a forked child: it shares it, and its signals are not ours."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=Door().hook(_forget_pipe))


def _forget_pipe() -> None:
    if (now := signal.set_wakeup_fd(-1)) not in (-1, *_OURS):
        signal.set_wakeup_fd(now)  # somebody else's


def _main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _stuck() -> bool:
    """Tell whether the main thread stands still inside one call."""
    main = threading.main_thread().ident
    seen = set()
    for _ in range(_LOOKS):
        frame = sys._current_frames().get(main or 0)
        seen.add((id(frame), None if frame is None else frame.f_lasti))
        time.sleep(0.01)
    return len(seen) == 1


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, 64)
    except OSError:
        return b""
