"""Rehearse a worker's step: run it once on its worst batch, then put everything back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memprof.errors import UsageError
from memprof.units import format_bytes

if TYPE_CHECKING:
    from memprof.watch.attach import Attachment

__all__ = ["Rehearsed", "rehearse"]


@dataclass(frozen=True)
class Rehearsed:
    """What a rehearsal found: the highest allocated bytes of the step, and the snapshot that was written (or None)."""

    peak_bytes: int
    snapshot: Path | None

    def __str__(self) -> str:
        return f"rehearsed: peak {format_bytes(self.peak_bytes)}"


def rehearse(
    watch: Attachment, step: Callable[..., Any], batch: tuple[Any, ...], model: Any, optimizer: Any
) -> Rehearsed:
    """Call ``step(*batch)`` once as later steps will find the device, write a snapshot, and restore what it changed.

    Parameters, buffers, gradients, optimizer state and random numbers are put back to the bit. What else ``step``
    changes (counters, files, other processes) is not.

    Raises:
        UsageError: there is no model or optimizer of torch's kind that could be put back.
        BaseException: what ``step`` raises, after all is put back; out of memory is written first.
    """
    import torch

    from memprof.integrations.callback.keeping import Kept
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
    session = watch._session
    session.set_step(0)
    mark = session.enter_phase(Phase.OTHER.value, detail=REHEARSAL)
    try:
        _make_state(inner)
        with TrainingPhases(model, watch._enter, watch._inner):
            step(*batch)
    except BaseException as error:
        watch._failed(error)
        raise
    finally:
        if mark is not None:
            session.exit_phase(mark)
        peak = int(session.peak_of_step())
        kept.restore()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        session.set_step(watch._step)
    return Rehearsed(peak, watch.dump("a step was rehearsed"))


def _make_state(optimizer: Any) -> None:
    """Step once with gradients of zero: later steps have the state from their beginning."""
    import torch

    if optimizer.state:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
