"""End a script after some optimizer steps, without its checkpoints: the values in them are not a GPU's."""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType
from typing import Any

from memprof.emulate.after_import import when_imported


def end_after(steps: int) -> None:
    """End the process after ``steps`` optimizer steps: of a trainer when its ``train`` is over, of a loop at once."""
    ending = _Ending(steps)
    when_imported("torch.optim.optimizer", ending.watch_optimizers)
    when_imported("transformers.trainer", ending.watch_trainers)


class _Ending:
    """Counts the optimizer steps of a trainer, or of the first optimizer of a loop."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._trains = False
        self._optimizer: Any = None
        self._done = 0

    def watch_optimizers(self, module: ModuleType) -> None:
        """Count the steps of the first optimizer that steps."""
        module.register_optimizer_step_post_hook(self._stepped)

    def watch_trainers(self, module: ModuleType) -> None:
        """Stop every trainer after its steps, and keep it from writing checkpoints of values that are not real."""
        stop, train, ending = _stopping_callback(module.TrainerCallback, self._steps), module.Trainer.train, self

        @functools.wraps(train)
        def wrapper(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            ending._trains = True
            trainer.add_callback(stop)
            result = train(trainer, *args, **kwargs)
            if trainer.state.global_step < ending._steps:
                return result
            ending._end("the script's lines after train() were not run")

        module.Trainer.train = wrapper

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        if self._trains:
            return
        self._optimizer = self._optimizer or optimizer
        if optimizer is self._optimizer:
            self._done += 1
            if self._done >= self._steps:
                self._end("the rest of the script was not run")

    def _end(self, rest: str) -> None:
        steps = "1 step" if self._steps == 1 else f"{self._steps} steps"
        if os.environ.get("RANK", "0") == "0":
            print(f"memprof emulate: ended after {steps} (--steps); {rest}.", file=sys.stderr, flush=True)
        raise SystemExit(0)


def _stopping_callback(base: Any, steps: int) -> Any:
    """Build a TrainerCallback that ends training after ``steps`` and saves nothing."""

    def on_step_end(self: Any, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_save = False
        control.should_training_stop = control.should_training_stop or state.global_step >= steps
        return control

    def on_epoch_end(self: Any, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_save = False
        return control

    return type("StopAfterSteps", (base,), {"on_step_end": on_step_end, "on_epoch_end": on_epoch_end})
