"""Run a function over many inputs in other processes or on other machines, and get the answers in order.

Everything here speaks :class:`concurrent.futures.Executor`. :func:`open_executor` makes one of a name
(``local``, ``dask:ADDRESS``, ``ray``, ``ray:ADDRESS``); :func:`answers` maps with it. Without an executor the
function runs in this process, and what a lost worker did not answer runs here too: the answers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, TypeVar

from memprof.errors import MemprofError, UsageError, how_to_install
from memprof.executors.machine import cores, free_memory
from memprof.executors.ray_tasks import RETRIES, RayExecutor

_In = TypeVar("_In")
_Out = TypeVar("_Out")

_KINDS = ("local", "dask", "ray")


def check_executor(name: str) -> tuple[str, str]:
    """Split the name of an executor into its kind and address.

    Raises:
        UsageError: there is no such kind, or Dask without an address.
    """
    kind, _, address = name.partition(":")
    if kind not in _KINDS or (kind == "local" and address):
        raise UsageError(f"--executor {name!r:.60} is none of local, dask:ADDRESS, ray and ray:ADDRESS.")
    if kind == "dask" and not address:
        raise UsageError("--executor dask needs the scheduler's address, such as dask:tcp://10.0.0.1:8786.")
    return kind, address


@contextmanager
def open_executor(name: str | None, tasks: int, bytes_each: int = 0) -> Iterator[Executor | None]:
    """Open an executor for ``tasks``; None where this process does as well, for one task or on one core.

    Args:
        name: ``local``, ``dask:ADDRESS``, ``ray``, ``ray:ADDRESS``; None for ``local``.
        tasks: how many inputs there are.
        bytes_each: the memory that a task needs; locally no more run at once than there is memory for.

    Raises:
        UsageError: no such executor, its package is missing, or nothing answers at the address.
    """
    kind, address = check_executor(name or "local")
    if kind == "local":
        workers = min(cores(), tasks, max(free_memory() // max(bytes_each, 1), 1))
        if workers < 2:
            yield None
            return
        # Not by fork, which copies locks that other threads hold.
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            yield pool
    elif kind == "dask":
        with _dask(address) as executor:
            yield executor
    else:
        with RayExecutor(address or None) as executor:
            yield executor


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
    """
    futures = None if executor is None else _submitted(executor, function, inputs)
    for number, given in enumerate(inputs):
        yield function(given) if futures is None else _answer(futures[number], function, given)
        if told is not None:
            told(number + 1, len(inputs))


def _submitted(executor: Executor, function: Callable[[_In], _Out], inputs: Iterable[_In]) -> list[Future[_Out] | None]:
    """Submit all inputs; None stands for what a broken executor did not take."""
    futures: list[Future[_Out] | None] = []
    for given in inputs:
        try:
            futures.append(executor.submit(function, given))
        except MemprofError:
            raise
        except Exception:
            futures.append(None)
    return futures


def _answer(future: Future[_Out] | None, function: Callable[[_In], _Out], given: _In) -> _Out:
    """Return a worker's answer. Where the worker was lost, the executor broke or cannot carry the answer, ask here."""
    if future is None:
        return function(given)
    try:
        return future.result()
    except MemprofError:
        raise
    # Dask, Ray and pools each raise their own errors for a lost worker; an error of the function itself comes again.
    except (Exception, CancelledError):
        return function(given)


@contextmanager
def _dask(address: str) -> Iterator[Executor]:
    try:
        from distributed import Client
    except ImportError:
        raise UsageError(f"--executor dask needs Dask: {how_to_install('dask')}.") from None
    try:
        connect: Any = Client  # untyped where Dask is installed, unknown where it is not
        client = connect(address, timeout="5s")
    except (OSError, ValueError) as error:
        raise UsageError(f"--executor dask:{address}: no scheduler answers there ({error!s:.100}).") from None
    with client:
        yield client.get_executor(retries=RETRIES, pure=False)
