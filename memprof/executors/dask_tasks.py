"""Run functions on a Dask cluster."""

from __future__ import annotations

from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any

from memprof.errors import UsageError, how_to_install
from memprof.executors.cluster import RETRIES, TIMEOUT_S, ClusterExecutor, connected, within

_CLOSE_S = 5
# A function of memprof could not be asked where there is no memprof.
_HAS_MEMPROF = "__import__('importlib.util').util.find_spec('memprof') is not None"


class DaskExecutor(ClusterExecutor):
    """Run functions on a Dask cluster, which starts a task again whose worker was lost."""

    def __init__(self, address: str, timeout_s: float = TIMEOUT_S) -> None:
        """Connect to the scheduler at ``address``.

        Raises:
            UsageError: Dask is not installed, or no scheduler answers at the address.
        """
        name = f"dask:{address}"
        try:
            client: Any = _client_class()  # untyped where Dask is installed, unknown where it is not
        except ImportError:
            raise UsageError(f"--executor dask needs Dask: {how_to_install('dask')}.") from None
        self._client = connected(
            name, "scheduler", timeout_s, lambda: client(address, timeout=timeout_s, set_as_default=False)
        )
        super().__init__(name, self._client.get_executor(retries=RETRIES, pure=False), timeout_s)
        try:
            self._check_workers()
        except UsageError:
            self.shutdown()
            raise

    def _check_workers(self) -> None:
        """Refuse workers without memprof: a worker that receives a function which it cannot import ends."""
        try:
            has_memprof = within(self.timeout_s or TIMEOUT_S, lambda: self._client.run(eval, _HAS_MEMPROF))
        except Exception as error:
            raise self.failure(error) from error
        if not all(has_memprof.values()):
            raise self.without_memprof()

    def meaning(self, error: Exception) -> str | None:
        if isinstance(error, CancelledError):
            return "the connection to the scheduler was lost; check that it still runs, and repeat the command"
        if type(error).__name__ == "KilledWorker":
            return "the same task lost its worker each time; check its log and its memory limit"
        return None

    def workers(self) -> int | None:
        return sum(int(threads) for threads in self._client.nthreads().values())

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Disconnect, also from a scheduler that no longer answers."""
        with suppress(Exception):
            self._client.close(timeout=_CLOSE_S)


def _client_class() -> Any:
    """Import Dask's client; a lost connection ends in a sentence, so Dask's log of it is not shown."""
    import dask.config

    quiet = dict.fromkeys(("distributed", "distributed.client"), "critical")
    with dask.config.set(logging=quiet):  # read once, when distributed is imported
        from distributed import Client
    return Client
