"""A thread that looks at the process and its device a few times a second, between the phases' own looks.

What phases see at their ends misses what comes and goes inside them, and what other processes do. A row is kept when a
figure moved by a mebibyte or five seconds passed, so an hour of an even run is a few hundred rows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from memprof.recording.guard import FailureGuard

MOST_HERTZ = 10.0
_MOVED = 1 << 20
_AT_LEAST_EVERY_US = 5_000_000
_LOST = "the device's memory between the ends of phases"

Row = list["int | None"]


class Sampler:
    """Call ``look`` at most ten times a second; pass rows with something new to ``keep``, on the sampler's thread.

    A row's first figure is the time in microseconds. ``looks`` and ``seconds`` say how often it looked and the CPU time
    that took.
    """

    def __init__(self, look: Callable[[], Row], keep: Callable[[Row], None], hertz: float = MOST_HERTZ) -> None:
        self.looks = 0
        self.seconds = 0.0
        self._look = look
        self._keep = keep
        self._pause = 1 / min(max(hertz, 0.01), MOST_HERTZ)
        self._last: Row | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, as a daemon: it never delays the end of the process."""
        self._over.clear()
        self._thread = threading.Thread(
            target=FailureGuard(lost=_LOST).hook(self._run), name="memprof-sampler", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop after the sample in progress."""
        self._over.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    def _run(self) -> None:
        while not self._over.wait(self._pause):
            begun = time.thread_time()
            row = self._look()
            if self._says_something(row):
                self._last = row
                self._keep(row)
            self.looks += 1
            self.seconds += time.thread_time() - begun

    def _says_something(self, row: Row) -> bool:
        last = self._last
        if last is None or len(last) != len(row):
            return True
        if (row[0] or 0) - (last[0] or 0) >= _AT_LEAST_EVERY_US:
            return True
        return any(
            (a is None) != (b is None) or (a is not None and b is not None and abs(a - b) >= _MOVED)
            for a, b in zip(last[1:], row[1:], strict=True)
        )
