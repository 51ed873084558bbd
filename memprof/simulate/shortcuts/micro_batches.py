"""Leave out micro-batches that repeat the one before them, where a search asks for many runs.

The first micro-batch of an optimizer step makes the gradients, the second adds to them, and the last one is followed
by the optimizer. Those between the third and the last do what the third did: their work is counted, and they are not
run. What the allocator reserves could still change from one to the next (from the second to the third it did, by a
small segment), so only searches take this shortcut; ``memprof simulate`` runs every micro-batch.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from memprof.compat import patching
from memprof.compat import transformers as transformers_names
from memprof.compat import trl as trl_names
from memprof.simulate.recorder.flops import Tally
from memprof.simulate.recorder.recorder import FakeRecorder

#: Micro-batches of an optimizer step that are run, the last one included.
MOST_RUN = 4


@contextlib.contextmanager
def middle_left_out(recorder: FakeRecorder) -> Iterator[None]:
    """Leave out a step's micro-batches between the third and the last, while open."""
    original = transformers_names.TRAINING_STEP.get()
    step = _Step(recorder)

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        last, generates = self.accelerator.gradient_state.sync_gradients, _generates(self)
        if not last and not generates and (loss := step.repeated()) is not None:
            return loss
        with contextlib.nullcontext() if generates else step.counted():
            loss = original(self, model, inputs, num_items_in_batch)
        step.ran(loss, last=last)
        return loss

    with patching((transformers_names.TRAINING_STEP, training_step)):
        yield


def _generates(trainer: Any) -> bool:
    """Tell whether a micro-batch begins with a generation, whose batch lasts for so many micro-batches."""
    every = (getattr(trainer.args, "steps_per_generation", None) or 0) * getattr(trainer.args, "num_iterations", 1)
    return bool(every) and trl_names.MICRO_STEP.of(trainer, 0) % every == 0


class _Step:
    """Count an optimizer step's micro-batches, and keep the work of the last one that began with no generation."""

    def __init__(self, recorder: FakeRecorder) -> None:
        self._recorder = recorder
        self._done = 0
        self._work: dict[str, Tally] = {}
        self._loss: Any = lambda: None

    def repeated(self) -> Any:
        """Count one more micro-batch like those before and return the last one's loss; None where it must be run."""
        loss = self._loss()
        if self._done < MOST_RUN - 1 or loss is None or not self._work:
            return None
        self._recorder.work.add_counted(self._work)
        return loss

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Take the work done inside for that of a repeated micro-batch."""
        work, (_, step) = self._recorder.work, self._recorder.phase_and_step()
        before = {phase: tally.copy() for phase, tally in work.of_step(step).items()}
        yield
        self._work = {phase: tally.since(before.get(phase)) for phase, tally in work.of_step(step).items()}

    def ran(self, loss: Any, *, last: bool) -> None:
        self._done = 0 if last else self._done + 1
        self._loss = weakref.ref(loss)
