"""Give every trainer a script builds the callback of ``memprof run``. Imported when transformers is there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from memprof.compat import require
from memprof.foreign import Args, Kwargs
from memprof.integrations.callback.callback import MemProfCallback
from memprof.integrations.callback.options import Options
from memprof.integrations.callback.trainer_lookup import find_trainer
from memprof.recording.guard import FailureGuard, on_stderr


class LaunchedCallback(MemProfCallback):
    """As :class:`MemProfCallback`; a script's output stays its own, and a callback it brings itself has precedence."""

    stream = "stderr"
    _begun: Callable[[], None] = staticmethod(lambda: None)  # a copy's

    def __init__(self, begun: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        self._begun = begun

    def _begin(self, options: Options, state: Any) -> None:
        trainer = find_trainer(self, state)
        self._begun()
        require("run")
        recording = _recording(trainer, self)
        if recording is self:
            super()._begin(options, state)
            return
        if self._early is not None:  # begun before the script added its own
            self._early[1].stop()
            self._early = None
        if not isinstance(recording, LaunchedCallback) and not getattr(trainer.accelerator, "process_index", 0):
            on_stderr(
                "memprof: this training is recorded by the script's own MemProfCallback, with its options; those of "
                "`memprof run` (--out, --steps ...) are not used."
            )

    def _found_trainer(self, state: Any = None) -> Any:
        trainer = super()._found_trainer(state)
        return trainer if _recording(trainer, self) is self else None


def _recording(trainer: Any, ours: MemProfCallback) -> MemProfCallback:
    """Return the callback that records a trainer: the first that the script gave to it, else our first."""
    handler = getattr(trainer, "callback_handler", None)
    callbacks = [c for c in getattr(handler, "callbacks", []) if isinstance(c, MemProfCallback)]
    return next((c for c in callbacks if not isinstance(c, LaunchedCallback)), next(iter(callbacks), ours))


def give_callback(module: ModuleType, options: Mapping[str, Any], begun: Callable[[], None]) -> None:
    """Let ``transformers.Trainer`` (of ``module``), and so every subclass, be built with a callback of ours.

    With an ``output_dir`` in ``options``, trainers after the first get a folder of their own in it; ``begun`` is called
    when one of them begins to train.
    """
    trainer = module.Trainer
    original = trainer.__init__
    signature = inspect.signature(original)
    built = 0

    def with_callback(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        nonlocal built
        try:
            bound = signature.bind(*args, **kwargs)
            given = list(bound.arguments.get("callbacks") or [])
        except TypeError:
            return args, kwargs  # the trainer refuses them: the script may try others
        built += not any(isinstance(c, MemProfCallback) for c in given)
        bound.arguments["callbacks"] = [*given, LaunchedCallback(begun, **_options(options, built))]
        return bound.args, bound.kwargs

    trainer.__init__ = FailureGuard("training", "all of it, in this trainer and later ones").changing(
        original, with_callback
    )


def _options(options: Mapping[str, Any], number: int) -> dict[str, Any]:
    own = dict(options)
    if own.get("output_dir") is not None and number > 1:
        own["output_dir"] = Path(own["output_dir"]) / f"trainer-{number}"
    return own
