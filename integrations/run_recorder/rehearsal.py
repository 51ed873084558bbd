"""Rehearse a step: run it once on its worst batch before the training, then put everything back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from memprof.integrations.run_recorder.state_backup import StateBackup

from memprof.recording.phases import REHEARSAL
from memprof.recording.session import Session
from memprof.units import format_bytes
from memprof.vocabulary import Phase


@dataclass(frozen=True)
class Rehearsed:
    """Hold a rehearsal's result: the step's highest allocated bytes, and the written snapshot (or None)."""

    peak_bytes: int
    snapshot: Path | None

    def __str__(self) -> str:
        return f"rehearsed: peak {format_bytes(self.peak_bytes)}"


def ran_out_of_memory(error: BaseException) -> bool:
    """Tell whether this is what a rehearsal is there to find."""
    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or "allocate memory" in str(error)


def rehearse(
    session: Session,
    step: Callable[[], object],
    kept: StateBackup,
    failed: Callable[[BaseException], None] = lambda error: None,
) -> int:
    """Run ``step`` in a phase of its own, as step 0; put back what was ``kept``; return the step's peak in bytes.

    ``failed`` is called with what the update raises, before anything is put back; it is raised after that.
    """
    session.set_step(0)
    mark = session.enter_phase(Phase.OTHER.value, detail=REHEARSAL)
    try:
        step()
    except BaseException as error:
        failed(error)
        raise
    finally:
        if mark is not None:
            session.exit_phase(mark)
        peak = session.peak_of_step()
        kept.restore()
    return peak
