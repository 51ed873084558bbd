"""Name an executor and the longest wait for it, as the command line gives them."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.errors import UsageError
from memprof.executors.cluster import TIMEOUT_S

_KINDS = ("local", "dask", "ray")


@dataclass(frozen=True)
class ExecutorChoice:
    """Name an executor.

    Attributes:
        kind: ``local``, ``dask`` or ``ray``.
        address: the cluster's; empty for none.
        timeout_s: the longest wait for a cluster's connection and next result, in seconds.
    """

    kind: str = "local"
    address: str = ""
    timeout_s: float = TIMEOUT_S

    @staticmethod
    def named(name: str, timeout_s: float = TIMEOUT_S) -> ExecutorChoice:
        """Return the executor of a name: ``local``, ``dask:ADDRESS``, ``ray`` or ``ray:ADDRESS``.

        Raises:
            UsageError: there is no such kind, or Dask without an address.
        """
        kind, _, address = name.partition(":")
        if kind not in _KINDS or (kind == "local" and address):
            raise UsageError(f"--executor {name!r:.60} is none of local, dask:ADDRESS, ray and ray:ADDRESS.")
        if kind == "dask" and not address:
            raise UsageError("--executor dask needs the scheduler's address, such as dask:tcp://10.0.0.1:8786.")
        return ExecutorChoice(kind, address, timeout_s)

    def __str__(self) -> str:
        return f"{self.kind}:{self.address}" if self.address else self.kind
