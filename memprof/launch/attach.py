"""What ``memprof run`` sets up before a script's first line, and finishes after its last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memprof.launch.imports import when_imported

if TYPE_CHECKING:
    from types import ModuleType

    from memprof.launch.loop import PlainLoop

__all__ = ["Attachment"]


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
        """Nothing heavy is imported here."""
        from memprof.integrations import output

        output.LATER = []
        when_imported("torch", self._torch)
        when_imported("transformers.trainer", self._trainer)
        when_imported("transformers.generation.utils", self._generation)

    def end(self, error: BaseException | None) -> None:
        """The script is over; ``error`` ended it, or None."""
        if self._loop is not None:
            self._loop.end()
        from memprof.integrations.output import say_later

        say_later()

    def _torch(self, torch: ModuleType) -> None:
        from memprof.launch.loop import PlainLoop

        if not self._trained:
            self._loop = PlainLoop(self._options)
            self._loop.begin()

    def _trainer(self, module: ModuleType) -> None:
        from memprof.launch.callback import give_callback

        give_callback(module, self._options, self._training)

    def _generation(self, module: ModuleType) -> None:
        if self._loop is not None:
            self._loop.watch_generation(module.GenerationMixin)

    def _training(self) -> None:
        """A trainer begins: its callback sees more than a loop's hooks do."""
        self._trained = True
        if self._loop is not None:
            self._loop.end()
            self._loop = None
