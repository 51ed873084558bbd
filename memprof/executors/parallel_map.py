"""Run a function over many inputs in other processes or on other machines, and get the answers in order.

Everything here accepts any :class:`concurrent.futures.Executor`. :func:`open_executor` makes one of a name;
:func:`answers` maps with it. Without an executor the function runs in this process. So does what a lost process of this
machine did not answer; a cluster that loses a task for good is an error, because its work may be too much for this
machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TypeVar

from memprof.errors import MemprofError
from memprof.executors.choice import ExecutorChoice
from memprof.executors.cluster import ClusterExecutor
from memprof.executors.machine import cores, free_memory

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@contextmanager
def open_executor(choice: ExecutorChoice | str, tasks: int, bytes_each: int = 0) -> Iterator[Executor | None]:
    """Open an executor for ``tasks``; None if this process does as well, for one task or on one core.

    Args:
        choice: an executor, or its name (:meth:`ExecutorChoice.named`).
        tasks: how many inputs there are.
        bytes_each: the memory that a task needs; locally no more run at once than there is memory for.

    Raises:
        UsageError: no such executor, its package is missing, or nothing answers at the address in time.
    """
    given = ExecutorChoice.named(choice) if isinstance(choice, str) else choice
    if given.kind == "local":
        workers = min(cores(), tasks, max(free_memory() // max(bytes_each, 1), 1))
        if workers < 2:
            yield None
            return
        # Not by fork, which copies locks that other threads hold.
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            yield pool
    elif given.kind == "dask":
        from memprof.executors.dask_tasks import DaskExecutor

        with DaskExecutor(given.address, given.timeout_s) as dask:
            yield dask
    else:
        from memprof.executors.ray_tasks import RayExecutor

        with RayExecutor(given.address or None, given.timeout_s) as ray:
            yield ray


def as_cluster(executor: Executor | None) -> ClusterExecutor | None:
    """Return an executor whose failures are errors; None for processes and threads of this machine.

    Any other executor is taken for a cluster's, and waited for without end.
    """
    if executor is None or isinstance(executor, (ClusterExecutor, ProcessPoolExecutor, ThreadPoolExecutor)):
        return executor if isinstance(executor, ClusterExecutor) else None
    return ClusterExecutor(type(executor).__name__, executor, timeout_s=None)


def answers(
    executor: Executor | None,
    function: Callable[[_In], _Out],
    inputs: Sequence[_In],
    told: Callable[[int, int], None] | None = None,
) -> Iterator[_Out]:
    """Yield ``function`` of each input, in order; without an executor it runs in this process.

    It must be importable by name where the executor's workers are other processes. ``told`` hears how many are done and
    how many there are.

    Raises:
        MemprofError: the function raised it.
        UsageError: a cluster lost a task, could not run it, or returned nothing in time.
    """
    cluster = as_cluster(executor)
    if cluster is not None:
        found = _of_cluster(cluster, function, inputs)
    elif executor is not None:
        found = _of_processes(executor, function, inputs)
    else:
        found = map(function, inputs)
    for number, answer in enumerate(found):
        yield answer
        if told is not None:
            told(number + 1, len(inputs))


def _of_cluster(cluster: ClusterExecutor, function: Callable[[_In], _Out], inputs: Sequence[_In]) -> Iterator[_Out]:
    futures = [cluster.submit(function, given) for given in inputs]
    completed = cluster.completed(futures)
    for future in futures:
        while not future.done():
            next(completed)
        yield cluster.result(future)


def _of_processes(executor: Executor, function: Callable[[_In], _Out], inputs: Sequence[_In]) -> Iterator[_Out]:
    """Yield the answers of this machine's processes; what a lost or broken one did not answer is asked here."""
    futures: list[Future[_Out] | None] = []
    for given in inputs:
        try:
            futures.append(executor.submit(function, given))
        except RuntimeError:  # broken or shut down
            futures.append(None)
    for given, future in zip(inputs, futures, strict=True):
        try:
            answer = function(given) if future is None else future.result()
        except MemprofError:
            raise
        # An answer that cannot be sent has any error; an error of the function itself comes again.
        except (Exception, CancelledError):
            answer = function(given)
        yield answer
