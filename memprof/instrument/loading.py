"""Record what a script does before its first forward, for the case that memory runs out there."""

from __future__ import annotations

import os
from collections.abc import Callable

from memprof.compat import torch as torch_names
from memprof.integrations.callback.options import Options
from memprof.recording import phases
from memprof.recording.api import make_recorder
from memprof.recording.guard import FailureGuard, on_stderr
from memprof.recording.session import Session
from memprof.vocabulary import Kind, Phase

# Entries kept: a script that never runs a model must not be slowed down by what nobody reads.
_RING = 100_000


class LoadWatch:
    """Keep CUDA's history from CUDA's first use on, until another recording begins.

    Whoever asks for a recorder ends it, and so does a script that turns torch's memory history on by itself: both find
    the history as if nobody had watched. ``ran_out`` is told, on the spot, when an allocation fails.
    """

    def __init__(self, options: Options, ran_out: Callable[[Session], None]) -> None:
        self._options = options
        self._ran_out = ran_out
        self._session: Session | None = None
        self._over = False
        self._guard = FailureGuard("script", "what it allocates before its first forward", on_stderr)
        self._guard.on_failure(self.end)

    def begin(self) -> None:
        """Wait for CUDA; where it is never used nothing happens."""
        when_used = torch_names.WHEN_CUDA_IS_USED.find()
        if when_used and self._options.kind != Kind.TRACE.value:
            when_used(self._guard.hook(self._start))

    def end(self) -> None:
        """Stop, and forget what was recorded."""
        self._over = True
        session, self._session = self._session, None
        if session is not None:
            session.stop()
        if self.end in phases.STANDING_BY:
            phases.STANDING_BY.remove(self.end)

    def _start(self) -> None:
        if self._over or phases.ACTIVE:
            return
        import torch

        from memprof.recording.cuda.history import CudaHistory

        recorder = make_recorder(
            torch.device("cuda", _device_index()),
            Kind.CUDA.value,
            max_entries=self._options.max_entries or _RING,
            stacks=self._options.stacks,
            reset_peaks=False,
        )
        session = Session(recorder, redact=self._options.redact, guard=self._guard)
        session.on_oom(lambda: self._ran_out(session))
        if isinstance(recorder, CudaHistory):
            recorder.on_switch = self._guard.hook(self.end)
        session.start()
        session.enter_phase(Phase.LOAD.value)
        self._session = session
        phases.STANDING_BY.append(self.end)


def _device_index() -> int:
    """Return the device this process will use: CUDA is used before a launcher's ranks have chosen theirs."""
    import torch

    local = int(os.environ.get("LOCAL_RANK", -1))
    return local if 0 <= local < torch.cuda.device_count() else torch.cuda.current_device()
