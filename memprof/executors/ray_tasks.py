"""Run functions as Ray tasks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from memprof.errors import UsageError, how_to_install
from memprof.executors.cluster import RETRIES, TIMEOUT_S, ClusterExecutor, connected, within
from memprof.foreign import Kwargs

_CLOSE_S = 10


class RayExecutor(ClusterExecutor):
    """Run functions as Ray tasks. Ray itself starts a task again whose worker or machine was lost."""

    def __init__(self, address: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        """Connect to the cluster at ``address``, else to the one that is connected, else start one here.

        Raises:
            UsageError: Ray is not installed, or nothing answers at the address.
        """
        try:
            import ray
        except ImportError:
            raise UsageError(f"--executor ray needs Ray: {how_to_install('ray')}.") from None
        name = f"ray:{address}" if address else "ray"
        self._began = not ray.is_initialized()
        if self._began:
            join: Any = ray.init  # typed in newer releases only
            options = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
            connected(name, "cluster", timeout_s, lambda: join(address=address, **options))
        super().__init__(name, _Tasks(), timeout_s)

    def meaning(self, error: Exception) -> str | None:
        if type(error).__name__ in ("WorkerCrashedError", "OutOfMemoryError", "NodeDiedError"):
            return "the same task lost its worker each time; check its log and its memory"
        return None

    def workers(self) -> int | None:
        import ray

        resources: Any = ray.cluster_resources  # untyped
        return int(resources().get("CPU", 0))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster, where this executor joined it."""
        import ray

        if self._began:
            try:
                within(_CLOSE_S, ray.shutdown)
            except TimeoutError:  # the cluster is gone; the process ends without it
                return


class _Tasks(Executor):
    """Submit functions as Ray tasks."""

    def __init__(self) -> None:
        import ray

        self._run = ray.remote(_called).options(max_retries=RETRIES, num_cpus=1)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = self._run.remote(fn, args, kwargs).future()
        return future


def _called(function: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
    return function(*args, **kwargs)
