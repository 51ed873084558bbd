"""Do inside a process on the emulated device what takes Python: others' kernels' values, the recording, the early end.

``startup/sitecustomize.py`` calls :func:`attach` when Python starts, in every process of the command: the script's,
each rank's, a launcher's. Only where a model trains is anything recorded.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import sys
from types import ModuleType
from typing import Any

from memprof.emulate.operator_values import compute_operators
from memprof.emulate.triton_values import compute_launches, count_compiled
from memprof.watch.import_hook import when_imported
from memprof.watch.run import Attachment

__all__ = ["RECORD", "attach", "missing_function"]

_UNDEFINED = re.compile(r"undefined symbol: ((?:cu|nvml|nccl|nvrtc)\w+)")

#: The environment variable that asks for a recording: the callback's options, and after how many steps to end.
RECORD = "MEMPROF_EMULATE_RECORD"

_attached = False


def attach(values: bool) -> None:
    """Wait for torch, Triton and transformers to be imported, and do what the environment asks for, once a process.

    A process that calls ``enter`` and whose parent had called it comes here twice; twice attached, every Triton kernel
    would be computed twice.

    Args:
        values: compute what Triton's and bitsandbytes' kernels would have written.
    """
    global _attached
    if _attached:
        return
    _attached = True
    _naming_missing_functions()
    if values:
        when_imported("triton.runtime.jit", compute_launches)
        when_imported("torch._inductor.runtime.triton_heuristics", count_compiled)
        when_imported("bitsandbytes", compute_operators)
    if RECORD in os.environ:
        _record(json.loads(os.environ[RECORD]))


def _naming_missing_functions() -> None:
    """Add a sentence to the error that ends the script where the emulated driver lacks a function."""
    before = sys.excepthook

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        before(kind, error, trace)
        if name := missing_function(error):
            print(
                f"memprof emulate: the emulated driver has no {name}, which a library of this environment links. Use "
                "the versions that docs/emulate.md names, or ask for this function in an issue.", file=sys.stderr,
            )  # fmt: skip

    sys.excepthook = hook


def missing_function(error: BaseException | None) -> str:
    """Return the function of CUDA's that an error, or one that led to it, says is undefined; empty where none does."""
    while error is not None:
        if found := _UNDEFINED.search(str(error)):
            return found.group(1)
        error = error.__cause__ or error.__context__
    return ""


def _record(asked: dict[str, Any]) -> None:
    """Record as ``memprof run`` does, and end after the asked steps."""
    from memprof.recording.api import switched_off

    if switched_off():
        return
    attachment = Attachment(asked["options"])
    # Before torch's own: exit handlers run backwards, and the report needs torch.
    when_imported("torch", lambda torch: _at_exit(attachment, torch))
    attachment.begin()
    if asked["steps"]:
        ending = _Ending(asked["steps"])
        when_imported("torch.optim.optimizer", ending.watch_optimizers)
        when_imported("transformers.trainer", ending.watch_trainers)


def _at_exit(attachment: Attachment, torch: Any) -> None:
    atexit.register(_finish, attachment, torch)
    if torch.version.cuda is None:
        print(
            f"memprof emulate: {sys.executable} has torch {torch.__version__}, which is built without CUDA: it sees no "
            "emulated card.", file=sys.stderr,
        )  # fmt: skip


def _finish(attachment: Attachment, torch: Any) -> None:
    """Report, or say why there is nothing to report: a script that used the card must not end without a word."""
    attachment.end(None)
    if torch.cuda.is_initialized() and not attachment.recorded and os.environ.get("RANK", "0") == "0":
        print("memprof emulate: nothing was recorded: no model's forward ran on the card.", file=sys.stderr, flush=True)


class _Ending:
    """Ends the process after some optimizer steps: of a trainer when its ``train`` is over, of a loop at once."""

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
