"""Handle SIGTERM and Ctrl-C in the process that is recorded, and in no process that it forks.

An exception unwinds through the code that writes recordings. SIGTERM does not: by default the process ends at once.
While a run is recorded, and if the program has no SIGTERM handler of its own, memprof installs one that writes what
was recorded; the process then dies by the signal, as it would have without memprof. Python runs a handler only between
two bytecode instructions of the main thread, so a call into C delays it until the call returns.

A forked child has no such handler. It would inherit one: a child inside a C call could not be terminated, and a
SIGTERM that reaches a child while Python starts in it would be lost. So SIGTERM is blocked in the forking thread from
before the fork until the child has its default action back; the kernel keeps a signal that arrives in between. A
program started by ``exec`` (``subprocess``, ``posix_spawn``, the ``spawn`` and ``forkserver`` start methods) has no
handlers.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from memprof.recording.guard import FailureGuard, guarded

# Handlers of memprof in this process, by signal: memprof's, and the one that was there before.
_installed: dict[int, tuple[Any, Any]] = {}
# What writes recordings before SIGTERM ends the process, oldest first.
_saving: list[Terminations] = []
# Blocks that are to finish before SIGTERM is acted on, and whether one waits for them.
_delays = 0
_is_delayed = False
# In a thread that forks: whether the program itself had blocked SIGTERM.
_forking = threading.local()


class Interrupts:
    """Delay a Ctrl-C in the block to its end, so that what it writes is complete; a second one is not delayed.

    Only Python's default handler is replaced, on the main thread. ``pending`` is whether a Ctrl-C came; the caller
    raises it.
    """

    def __init__(self) -> None:
        self.pending = False
        self.guard = FailureGuard(lost="nothing: a Ctrl-C is not delayed")
        self._handler: Any = None

    @guarded
    def __enter__(self) -> Interrupts:
        self._handler = _install(signal.SIGINT, self._delay, signal.default_int_handler)
        return self

    @guarded
    def __exit__(self, *_: object) -> None:
        _remove(signal.SIGINT, self._handler)

    def _delay(self, number: int, frame: FrameType | None) -> None:
        if self.pending:
            raise KeyboardInterrupt
        self.pending = True


class Terminations:
    """Call ``save``, which writes what was recorded, when SIGTERM ends the process.

    With several of them the newest is called first. Nothing is installed on another thread than the main one, or if the
    program has a SIGTERM handler; its own handler, or the end of the process, then decides what is written.
    """

    def __init__(self, save: Callable[[], None]) -> None:
        self.save = save
        self.guard = FailureGuard(lost="what was recorded until SIGTERM")

    @guarded
    def start(self) -> None:
        """Call ``save`` on SIGTERM from now on."""
        if signal.SIGTERM not in _installed:
            _install(signal.SIGTERM, _terminated, signal.SIG_DFL)
        if signal.SIGTERM in _installed and self not in _saving:
            _saving.append(self)

    @guarded
    def stop(self) -> None:
        """Stop calling ``save``; the last one to stop puts the default action back."""
        if self in _saving:
            _saving.remove(self)
        if not _saving and signal.SIGTERM in _installed:
            _remove(signal.SIGTERM, _installed[signal.SIGTERM][0])


@contextmanager
def delayed_termination() -> Iterator[None]:
    """Finish the block before SIGTERM is acted on; a second one ends the process at once. Main thread only."""
    global _delays
    if not _is_main_thread():
        yield
        return
    _delays += 1
    try:
        yield
    finally:
        _delays -= 1
        if _is_delayed and not _delays:
            _save_and_die()


@contextmanager
def finish_first() -> Iterator[None]:
    """Finish the block before SIGTERM or Ctrl-C is acted on; a second signal is not delayed.

    Raises:
        KeyboardInterrupt: at the end of the block, if Ctrl-C was pressed in it.
    """
    interrupts = Interrupts()
    with delayed_termination():
        try:
            with interrupts:
                yield
        finally:
            if interrupts.pending:
                raise KeyboardInterrupt


def _terminated(number: int, frame: FrameType | None) -> None:
    global _is_delayed
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
    if _delays:
        _is_delayed = True
    else:
        _save_and_die()


def _save_and_die() -> None:
    saving, _saving[:] = list(reversed(_saving)), []
    try:
        for one in saving:
            one.guard.run_all_cleanups(one.save)
        FailureGuard(lost="what was not printed yet").run_all_cleanups(sys.stdout.flush, sys.stderr.flush)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _install(number: int, step: Callable[[int, FrameType | None], None], previous: Any) -> Any:
    """Handle a signal whose handler is ``previous``; return the handler, or None if the signal has another."""
    if not _is_main_thread() or signal.getsignal(number) is not previous:
        return None
    _keep_from_children()
    handler = FailureGuard().hook(step)
    _installed[number] = (handler, previous)
    signal.signal(number, handler)
    return handler


def _remove(number: int, handler: Any) -> None:
    """Put the previous handler back, unless the program has installed another one since."""
    ours, previous = _installed.get(number, (None, None))
    if ours is None or ours is not handler or not _is_main_thread():
        return
    if signal.getsignal(number) is handler:
        signal.signal(number, previous)
    del _installed[number]


# -- forks -------------------------------------------------------------------------------------------------------------


@functools.cache
def _keep_from_children() -> None:
    """Let every fork from now on leave memprof's handlers in the parent; hooks cannot be taken back."""
    if hasattr(os, "register_at_fork"):
        before, parent, child = (
            FailureGuard().hook(step) for step in (_before_fork, _after_fork, _after_fork_in_child)
        )
        os.register_at_fork(before=before, after_in_parent=parent, after_in_child=child)


def _before_fork() -> None:
    # Asked for first: a handler of the program's that raises here must not leave the signal blocked.
    _forking.blocked = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    if vars(_forking).pop("blocked", True) is False:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _after_fork_in_child() -> None:
    global _delays, _is_delayed
    for number, (handler, previous) in _installed.items():
        if signal.getsignal(number) is handler:
            signal.signal(number, previous)
    _installed.clear()
    _saving.clear()
    _delays, _is_delayed = 0, False
    _after_fork()  # a SIGTERM that came meanwhile ends the child here
