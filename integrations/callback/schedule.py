"""Choose which optimizer steps are recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import index

from memprof.errors import UsageError


@dataclass(frozen=True)
class Cycle:
    """How a trainer generates: every ``micro_steps`` micro-batches, of which ``accumulation`` make one optimizer step.
    """

    micro_steps: int = 1
    accumulation: int = 1

    @property
    def steps(self) -> int:
        """Return optimizer steps one generation serves."""
        return max(1, math.ceil(self.micro_steps / self.accumulation))

    def generates(self, first_micro: int) -> bool:
        """Tell whether an optimizer step whose first micro-batch has this number generates."""
        ahead = -first_micro % self.micro_steps
        return ahead < self.accumulation


class RecordingSchedule:
    """Decides at each optimizer step's beginning, by the numbers of ``steps``, from 1, or ``every`` so many a whole
    cycle.

    Without either, one whole generation cycle is recorded, the first that begins after the first optimizer step of a
    ``train()`` (only then is there optimizer state); where the run is too short for that, the first.

    Raises:
        UsageError: steps that are no steps.
    """

    def __init__(self, steps: int | Iterable[int] | None = None, every: int | None = None) -> None:
        try:
            numbers = None if steps is None else [index(s) for s in (steps if isinstance(steps, Iterable) else [steps])]
        except TypeError:
            numbers = [0]
        if numbers is not None and any(n < 1 for n in numbers):
            raise UsageError("steps are optimizer steps counted from 1, such as steps=[2, 10].")
        self._steps = None if numbers is None else frozenset(numbers)
        if every is not None and every < 1:
            raise UsageError("every=N records every Nth optimizer step; N is at least 1.")
        self._every = every
        self._until = 0
        self._done = False

    def begins(self, step: int, first_step: int, last_step: int, ask: Callable[[], tuple[Cycle, int]]) -> bool:
        """Tell whether a new recording begins with ``step``, counted from 1.

        ``first_step`` is later than 1 when resumed; ``ask`` returns how the trainer generates, and its count of
        micro-batches so far. Most steps need no answer.
        """
        if self._steps is not None or self._every is not None:
            chosen = step in (self._steps or ()) or (self._every is not None and step % self._every == 0)
            if chosen and step >= self._until:
                cycle, _ = ask()
                self._until = step + (cycle.steps if self._every is not None else 1)
                return True
            return False
        if self._done:
            return False
        cycle, micro = ask()
        if not self._default(step, first_step, last_step, micro, cycle):
            return False
        self._done = True
        self._until = step + cycle.steps
        return True

    def goes_on(self, step: int) -> bool:
        """Tell whether the recording that began earlier includes ``step``."""
        return step < self._until

    @staticmethod
    def _default(step: int, first_step: int, last_step: int, micro: int, cycle: Cycle) -> bool:
        if step > first_step:
            return cycle.generates(micro)
        later = (cycle.generates(micro + (s - step) * cycle.accumulation) for s in range(step + 1, last_step + 1))
        return not any(later)
