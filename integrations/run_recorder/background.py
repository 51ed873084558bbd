"""Do slow work beside the training, one piece at a time, and hand its result back on the thread that asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from memprof.recording.guard import FailureGuard


class Background:
    """Run one piece of work on a thread of its own; what it raised is raised where the next begins or is waited for.

    Writing a snapshot and reporting on it are pure Python and file writes, and touch no device: the training's thread
    gets the interpreter between the pieces of the file. What was taken from the allocator was taken before.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._then: Callable[[Any, float], None] | None = None
        self._result: Any = None
        self._error: BaseException | None = None
        self._seconds = 0.0

    def start(self, work: Callable[[], Any], then: Callable[[Any, float], None]) -> None:
        """Begin ``work``; ``then`` gets its result and its seconds in :meth:`look` or :meth:`finish`."""
        self.finish()

        def run() -> None:
            began = time.monotonic()
            try:
                self._result = work()
            except BaseException as error:  # raised where it is waited for
                self._error = error
            self._seconds = time.monotonic() - began

        self._then = then
        # Not a daemon: a process that ends without waiting still writes what it began.
        protected = FailureGuard("training", "a recording").hook(run)
        self._thread = threading.Thread(target=protected, name="memprof-writing", daemon=False)
        self._thread.start()

    def look(self) -> None:
        """Hand the result back if the work is done."""
        if self._thread is not None and not self._thread.is_alive():
            self.finish()

    def finish(self) -> None:
        """Wait for the work, and hand its result back."""
        thread, then = self._thread, self._then
        if thread is None or then is None:
            return
        thread.join()
        self._thread = self._then = None
        result, self._result = self._result, None
        error, self._error = self._error, None
        if error is not None:
            raise error
        then(result, self._seconds)
