"""Run functions on a cluster through an executor whose waits are bounded and whose failures are one sentence."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

from memprof._version import __version__
from memprof.errors import MemprofError, UsageError

_Out = TypeVar("_Out")

#: A task that a lost worker took with it is started again so often.
RETRIES = 3
#: The default of ``--executor-timeout``, in seconds.
TIMEOUT_S = 60.0
# Schedulers send the first bytes of a connection; a server that is silent for so long is asked whether it is a web
# server.
_SILENT_S = 2.0
# What a failure's sentence may add about the cluster is not waited for any longer.
_STATE_S = 5.0


class ClusterExecutor(Executor):
    """Run functions on the workers of another executor.

    Args:
        name: as ``--executor`` has it.
        executor: runs them.
        timeout_s: the longest wait for the next result of any task; None waits without end.
    """

    def __init__(self, name: str, executor: Executor, timeout_s: float | None = TIMEOUT_S) -> None:
        self.name, self.timeout_s = name, timeout_s
        self._executor = executor

    def submit(self, fn: Callable[..., _Out], /, *args: Any, **kwargs: Any) -> Future[_Out]:
        """Send a function to the cluster.

        Raises:
            UsageError: the cluster accepts nothing more.
        """
        try:
            return self._executor.submit(fn, *args, **kwargs)
        except Exception as error:
            raise self.failure(error) from error

    def completed(self, futures: Collection[Future[_Out]]) -> Iterator[Future[_Out]]:
        """Yield futures as they complete.

        Raises:
            UsageError: none completed within the timeout.
        """
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, self.timeout_s, FIRST_COMPLETED)
            if not done:
                raise self._error(f"no result for {self.timeout_s:g} s, {len(waiting)} tasks left{self._state()}")
            yield from done

    def result(self, future: Future[_Out]) -> _Out:
        """Return the result of a future that is done.

        Raises:
            MemprofError: the function raised it.
            UsageError: the cluster lost the task, or could not run it.
        """
        try:
            return future.result()
        except MemprofError:
            raise
        except Exception as error:  # each kind of cluster has its own errors
            raise self.failure(error) from error

    def failure(self, error: Exception) -> UsageError:
        """Return the sentence for what a cluster raised in place of a result."""
        if "No module named 'memprof'" in " ".join(str(cause) for cause in _chain(error)):
            return self.without_memprof()
        return self._error(self.meaning(error) or f"a task failed there with {type(error).__name__} ({_short(error)})")

    def without_memprof(self) -> UsageError:
        """Return the sentence for workers that lack memprof."""
        return self._error(f"its workers cannot import memprof; install memprof {__version__} where they run")

    def meaning(self, error: Exception) -> str | None:
        """Return what an error of this kind of cluster means and what to check; None for an unknown one."""
        return None

    def workers(self) -> int | None:
        """Return how many tasks the cluster runs at once; None if that is unknown. It may raise, or not return."""
        return None

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._executor.shutdown(wait=wait, cancel_futures=cancel_futures)

    def _error(self, words: str) -> UsageError:
        return UsageError(f"--executor {self.name}: {words}.")

    def _state(self) -> str:
        workers = None
        with suppress(Exception):
            workers = within(_STATE_S, self.workers)
        if workers is None:
            return "; check that the cluster still runs"
        if not workers:
            return "; it has no workers: start some, and check that they reach it"
        return f" on {workers} workers; if one task takes longer, raise --executor-timeout"


def within(seconds: float, function: Callable[[], _Out]) -> _Out:
    """Return what a function returns; one that does not return in time is left to a daemon thread.

    Raises:
        TimeoutError: it took longer.
    """
    future: Future[_Out] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True, name="memprof-within").start()
    if not wait([future], seconds).done:
        raise TimeoutError
    return future.result()


def connected(name: str, what: str, timeout_s: float, connect: Callable[[], _Out]) -> _Out:
    """Return a connection to a cluster, after a look at what answers at its address.

    Args:
        name: the executor's name, with the address.
        what: what is to answer there.
        timeout_s: the longest wait.
        connect: makes the connection.

    Raises:
        UsageError: something else answers there, or nothing in time.
    """
    address = name.partition(":")[2]
    try:
        _refuse_others(address, timeout_s)
        return within(timeout_s, connect)
    except TimeoutError:
        why = f"no answer in {timeout_s:g} s"
    except Exception as error:
        why = _short(error)
    raise UsageError(f"--executor {name}: no {what} answers there ({why}); check the address and that it runs.")


def _refuse_others(address: str, timeout_s: float) -> None:
    """Raise ConnectionError with what answers at an address, where nothing listens or a web server does."""
    protocol, _, place = address.rpartition("://")
    host, _, port = place.rpartition(":")
    if protocol not in ("", "tcp", "tls", "ray") or not host or not port.isdecimal():
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as connection:
            connection.settimeout(min(_SILENT_S, timeout_s))
            with suppress(socket.timeout):
                if connection.recv(1):
                    return
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            with suppress(socket.timeout):
                if connection.recv(5) == b"HTTP/":
                    raise _OtherServerError("a web server answers, perhaps the dashboard")
    except _OtherServerError:
        raise
    except TimeoutError:
        raise TimeoutError from None
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConnectionError(reason.lower()) from None


class _OtherServerError(ConnectionError):
    """Something else than a cluster listens at an address."""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it came from."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{lines[-1] if lines else type(error).__name__:.150}".rstrip(".")
