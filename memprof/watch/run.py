"""Set up what ``memprof run`` needs before a script's first line, and finish after its last."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memprof.compat import require
from memprof.compat.check import fault_of
from memprof.compat.transformers import TRAINER_INIT
from memprof.errors import UsageError
from memprof.integrations.callback.callback import MemProfCallback
from memprof.integrations.callback.finder import find_trainer
from memprof.watch.import_hook import when_imported

if TYPE_CHECKING:
    from memprof.watch.loop import PlainLoop

__all__ = [
    "Attachment",
    "LaunchedCallback",
    "give_callback",
]


class Attachment:
    """Waits for torch and transformers to be imported by the script; without them nothing happens.

    Args:
        options: of the callback, by their names there.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._loop: PlainLoop | None = None
        self._trained = False

    def begin(self) -> None:
        """Wait for imports; nothing heavy is imported here."""
        from memprof.integrations.callback import output

        output.LATER = []
        when_imported("torch", self._torch)
        when_imported("transformers.trainer", self._trainer)
        when_imported("transformers.generation.utils", self._generation)

    def end(self, error: BaseException | None) -> None:
        """Report when the script is over; ``error`` ended it, or None."""
        if self._loop is not None:
            self._loop.end()
        from memprof.integrations.callback.output import say_later

        say_later()

    def _torch(self, torch: ModuleType) -> None:
        from memprof.watch.loop import PlainLoop

        if not self._trained:
            self._loop = PlainLoop(self._options)
            self._loop.begin()

    def _trainer(self, module: ModuleType) -> None:
        if (fault := fault_of(TRAINER_INIT)) is not None:
            raise UsageError(f"{fault}.")
        give_callback(module, self._options, self._training)

    def _generation(self, module: ModuleType) -> None:
        if self._loop is not None:
            self._loop.watch_generation(module.GenerationMixin)

    def _training(self) -> None:
        """Leave a trainer to its callback: it sees more than a loop's hooks do."""
        self._trained = True
        if self._loop is not None:
            self._loop.end()
            self._loop = None


class LaunchedCallback(MemProfCallback):
    """As :class:`MemProfCallback`; a script's output stays its own, and a callback it brings itself has precedence."""

    stream = "stderr"

    def __init__(self, begun: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        self._begun = begun

    def _begin(self, state: Any) -> None:
        trainer = find_trainer(self, state)
        handler = getattr(trainer, "callback_handler", None)
        others = [c for c in getattr(handler, "callbacks", []) if isinstance(c, MemProfCallback) and c is not self]
        self._begun()
        require("run")
        if not others:
            super()._begin(state)


def give_callback(module: ModuleType, options: Mapping[str, Any], begun: Callable[[], None]) -> None:
    """Let ``transformers.Trainer``, and so every subclass, be built with a callback of ours.

    Args:
        module: ``transformers.trainer``.
        options: of the callback. With an ``output_dir``, trainers after the first get a folder of their own in it.
        begun: called when one of them begins to train.
    """
    trainer = module.Trainer
    original = trainer.__init__
    signature = inspect.signature(original)
    built = 0

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal built
        try:
            bound = signature.bind(self, *args, **kwargs)
            given = list(bound.arguments.get("callbacks") or [])
            if not any(isinstance(c, MemProfCallback) for c in given):
                built += 1
                bound.arguments["callbacks"] = [*given, LaunchedCallback(begun, **_options(options, built))]
                args, kwargs = bound.args[1:], bound.kwargs
        except Exception as error:
            warnings.warn(f"memprof could not attach to {type(self).__name__} ({error!r}).", stacklevel=2)
        original(self, *args, **kwargs)

    trainer.__init__ = __init__


def _options(options: Mapping[str, Any], number: int) -> dict[str, Any]:
    own = dict(options)
    if own.get("output_dir") is not None and number > 1:
        own["output_dir"] = Path(own["output_dir"]) / f"trainer-{number}"
    return own
