"""Many simulations: from the cache where they are known, else over the machine's cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

from memprof.config.catalogue import find_config
from memprof.config.settings import Settings
from memprof.errors import MemprofError
from memprof.plan import cache

__all__ = ["Runner", "runner"]

_ONE = 1_200_000_000  # memory of a worker process while it simulates, measured with room to spare


class Runner:
    """Runs settings, in parallel, and remembers what came out.

    Args:
        gpu: as ``--gpu``.
        workers: processes; None takes the cores there are, and no more than memory allows.
        progress: told of every simulation that is done or was known.
        use_cache: keep results on disk.
    """

    def __init__(
        self, gpu: str | None, workers: int | None, progress: Callable[[int, int], None] | None, use_cache: bool = True
    ) -> None:
        self.gpu = gpu
        self._workers = workers or max(1, min(os.cpu_count() or 1, 8, _free_memory() // _ONE))
        self._progress = progress
        self._use_cache = use_cache
        self._pool: ProcessPoolExecutor | None = None
        self._asked = self._done = 0
        self.executed = 0

    def run(self, wanted: list[Settings], refused: dict[int, str] | None = None) -> list[dict[str, Any]]:
        """Rows in the order of ``wanted``.

        Args:
            wanted: what to simulate.
            refused: where to put, by index, why one could not be simulated; its row is empty then.

        Raises:
            InputError, UsageError: one cannot be simulated, and ``refused`` was not given.
        """
        rows: dict[int, dict[str, Any]] = {}
        waiting: dict[Future[dict[str, Any]], tuple[int, str]] = {}
        self._asked += len(wanted)
        for index, settings in enumerate(wanted):
            key = cache.key_of(settings.to_dict(), find_config(settings.model), self.gpu)
            known = cache.load(key) if self._use_cache else None
            if known is not None:
                rows[index] = known
                self._step()
            else:
                waiting[self._submit(settings)] = (index, key)
        for future in as_completed(waiting):
            index, key = waiting[future]
            try:
                rows[index] = future.result()
            except MemprofError as error:
                if refused is None:
                    raise
                rows[index], refused[index] = {}, str(error)
            self.executed += 1
            if self._use_cache and rows[index]:
                cache.store(key, rows[index])
            self._step()
        return [rows[i] for i in range(len(wanted))]

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, settings: Settings) -> Future[dict[str, Any]]:
        from memprof.simulate.fit import run_row

        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._workers, mp_context=multiprocessing.get_context("spawn"), initializer=_one_thread
            )
        return self._pool.submit(run_row, settings.to_dict(), self.gpu)

    def _step(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._asked)


@contextmanager
def runner(
    gpu: str | None,
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    use_cache: bool = True,
) -> Iterator[Runner]:
    """A runner whose workers end with the block."""
    made = Runner(gpu, workers, progress, use_cache)
    try:
        yield made
    finally:
        made.close()


def _one_thread() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _free_memory() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return _ONE
