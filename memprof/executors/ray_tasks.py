"""Run functions as Ray tasks, behind :class:`concurrent.futures.Executor`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from memprof.errors import UsageError, how_to_install

#: A task that a lost worker took with it is started again so often.
RETRIES = 3


class RayExecutor(Executor):
    """Run functions as Ray tasks. Ray itself starts a task again whose worker or machine was lost."""

    def __init__(self, address: str | None = None) -> None:
        """Connect to the cluster at ``address``, else to the one that is connected, else start one here.

        Raises:
            UsageError: Ray is not installed, or nothing answers at the address.
        """
        try:
            import ray
        except ImportError:
            raise UsageError(f"--executor ray needs Ray: {how_to_install('ray')}.") from None
        self._began = not ray.is_initialized()
        if self._began:
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise UsageError(f"--executor ray:{address}: no cluster answers there ({error!s:.100}).") from None
        self._run = ray.remote(_called).options(max_retries=RETRIES, num_cpus=1)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = self._run.remote(fn, args, kwargs).future()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster, where this executor joined it."""
        import ray

        if self._began:
            ray.shutdown()


def _called(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)
