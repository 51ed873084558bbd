"""Rehearse a worker's step: run it once on its worst batch, then put everything back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memprof.errors import UsageError
from memprof.units import format_bytes

__all__ = ["Rehearsed", "rehearse"]


@dataclass(frozen=True)
class Rehearsed:
    """Hold a rehearsal's result: the step's highest allocated bytes, and the written snapshot (or None)."""

    peak_bytes: int
    snapshot: Path | None

    def __str__(self) -> str:
        return f"rehearsed: peak {format_bytes(self.peak_bytes)}"


def rehearse(
    session: Any,
    call: Callable[[], Any],
    model: Any,
    optimizer: Any,
    enter: Callable[[str], Any],
    leave: Callable[[Any], None],
    failed: Callable[[BaseException], None],
) -> int:
    """Make one update as later steps will find the device, restore what it changed, and return its peak in bytes.

    Parameters, buffers, gradients, optimizer state and random numbers are put back to the bit. What else it
    changes (counters, files, other processes) is not.

    Args:
        session: of the worker's recording.
        call: makes the update.
        model, optimizer: what is put back.
        enter, leave: open and close a phase.
        failed: called with what the update raises, before anything is put back.

    Raises:
        UsageError: there is no model or optimizer of torch's kind that could be put back.
        BaseException: what the update raises, after all is put back.
    """
    import torch

    from memprof.integrations.callback.keeping import Kept, make_optimizer_state
    from memprof.recording.owners import unwrap_optimizer
    from memprof.recording.phases import REHEARSAL
    from memprof.vocabulary import Phase
    from memprof.watch.training_method import TrainingPhases

    inner = unwrap_optimizer(optimizer) if optimizer is not None else None
    if not isinstance(model, torch.nn.Module) or not isinstance(inner, torch.optim.Optimizer):
        raise UsageError(
            "rehearse() puts weights and optimizer back: attach(model=..., optimizer=...) with a torch module and a "
            "torch optimizer (DeepSpeed and Megatron keep theirs elsewhere)."
        )
    kept = Kept(model, inner)
    session.set_step(0)
    mark = session.enter_phase(Phase.OTHER.value, detail=REHEARSAL)
    try:
        make_optimizer_state(inner)
        with TrainingPhases(model, enter, leave, session.door):
            call()
    except BaseException as error:
        failed(error)
        raise
    finally:
        if mark is not None:
            session.exit_phase(mark)
        peak = int(session.peak_of_step())
        kept.restore()
    return peak
