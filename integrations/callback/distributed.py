"""Send small summaries from a run's ranks to rank 0 when training ends, through the process group's own store.

No collective: it would wait for every rank, and a run that ends badly has lost one. Each rank says at the beginning
that it is here, and at the end leaves its summaries under a key; rank 0 reads those that come within a time, of ranks
that said they were here and whose process, where it can be seen, still lives. Every call runs on a thread of its own
with a deadline, so a store whose host is gone costs that long and no longer.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from memprof.compat.torch_sharding import STORE
from memprof.recording.guard import FailureGuard
from memprof.recording.recorder import RunIdentity

_T = TypeVar("_T")

# How long rank 0 waits for the others, and how long any rank waits for the store itself.
NORMAL_SECONDS = 60.0
FAILED_SECONDS = 8.0
_STORE_SECONDS = 5.0
_POLL = 0.05
# How many of a rank's newest recordings are sent, and the bytes that one rank's message may unpack to.
MOST_TOLD = 32
_MAX_BYTES = 16 << 20

# How many of each name this process has begun; the ranks of a run begin them in the same order.
_begun: Counter[str] = Counter()


class Gathering:
    """Exchange one rank's summaries of one ``train()`` with rank 0, through a ``store`` all ranks share: by default the
    one of the process group, if there is one. ``name`` tells what else in these processes exchanges apart."""

    def __init__(self, rank: int, world_size: int, store: Any = None, name: str = "training") -> None:
        _begun[name] += 1
        self.rank = rank
        self.world_size = world_size
        self.began = time.time()
        self._sent = False
        # A restarted worker group begins to count anew.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"memprof/{attempt}/{name}/{_begun[name]}"
        self._store: Any = store if store is not None else _default_store() if world_size > 1 else None
        if self._store is not None:
            self._bounded(lambda: self._store.set(self._key("here", rank), f"{os.getpid()} {platform.node()}"))

    def agree_on(self, what: str, proposal: str) -> str | None:
        """Return the first proposal that any rank made; no rank waits for another. None if the ranks cannot agree."""
        if self.world_size == 1:
            return proposal
        if self._store is None:
            return None
        word = json.dumps(proposal)  # ASCII, whatever a path is made of
        return self._bounded(lambda: str(json.loads(self._store.compare_set(self._key(what, 0), "", word))))

    def agree_on_identity(self) -> RunIdentity:
        """Return the identity of the run that all ranks use."""
        mine = RunIdentity.new()
        agreed = self.agree_on("run", f"{mine.id} {mine.started}")
        if agreed is None:
            return RunIdentity(None, mine.started)
        name, _, started = agreed.partition(" ")
        return RunIdentity(name, float(started))

    def tell(self, summaries: Iterable[dict[str, Any]]) -> bool:
        """Leave this rank's summaries, or an empty list, for rank 0, which waits for them; tell whether it worked."""
        if self._store is None or self._sent or self.rank == 0:
            return False
        self._sent = True
        word = _packed(list(summaries)[-MOST_TOLD:])
        done = self._bounded(lambda: (self._store.set(self._key("told", self.rank), word), True)[1])
        return bool(done)

    def told(self, seconds: float) -> dict[int, list[Any]]:
        """Return what the other ranks have told within ``seconds``, by rank, of those who told anything."""
        if self._store is None or self.rank != 0:
            return {}
        found: dict[int, list[Any]] = {}
        self._bounded(lambda: self._collect(found, time.monotonic() + seconds), seconds + _STORE_SECONDS)
        return dict(found)  # a thread that is late may still write into the other

    def _collect(self, found: dict[int, list[Any]], deadline: float) -> None:
        waiting = {r: pid for r in range(self.world_size) if r != self.rank and (pid := self._present(r)) is not None}
        while waiting:
            for rank in list(waiting):
                if self._store.check([self._key("told", rank)]):
                    found[rank] = _unpacked(self._store.get(self._key("told", rank)))
                    del waiting[rank]
                elif not _lives(waiting[rank]):
                    del waiting[rank]
            if time.monotonic() > deadline:
                return
            if waiting:
                time.sleep(_POLL)

    def _present(self, rank: int) -> str | None:
        key = self._key("here", rank)
        if not self._store.check([key]):
            return None
        said: bytes = self._store.get(key)
        return said.decode("utf-8", "replace")

    def _key(self, kind: str, rank: int) -> str:
        return f"{self._prefix}/{kind}/{rank}"

    def _bounded(self, call: Callable[[], _T], seconds: float | None = None) -> _T | None:
        """Return the call's result; None where it failed or took longer. Files are there in any case."""
        results: list[_T] = []

        def run() -> None:
            with contextlib.suppress(RuntimeError, OSError):  # the store is gone with the rank that kept it
                results.append(call())

        run = FailureGuard("run", "what another rank told").hook(run)
        thread = threading.Thread(target=run, name="memprof-ranks", daemon=True)
        thread.start()
        thread.join(_STORE_SECONDS if seconds is None else seconds)
        return results[0] if results else None


def _default_store() -> Any:
    """Return the store of the default process group, None where there is none."""
    try:
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return None
        return STORE.get()()
    except Exception:
        return None


def _lives(said: str) -> bool:
    """Tell whether the process that said it was here is there still; of another machine's nobody knows here."""
    pid, _, node = said.partition(" ")
    if node != platform.node() or not pid.isdigit():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return not _is_zombie(int(pid))


def _is_zombie(pid: int) -> bool:
    """Tell whether a process has ended and its parent has not collected it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[:1] == [b"Z"]
    except OSError:
        return False


def _packed(summaries: list[dict[str, Any]]) -> str:
    return zlib.compress(json.dumps(summaries, separators=(",", ":")).encode(), 6).hex()


def _unpacked(word: bytes) -> list[Any]:
    text = zlib.decompressobj().decompress(bytes.fromhex(word.decode("ascii")), _MAX_BYTES)
    summaries = json.loads(text)
    return summaries if isinstance(summaries, list) else []
