"""Set up what ``memprof run`` needs before a script's first line, and finish after its last.

Nothing heavy may be imported here: the script decides when torch and transformers are, and in which environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memprof.analysis.ranks.run_folders import RUN_FOLDER
from memprof.compat.check import fault_of
from memprof.compat.transformers import TRAINER_INIT
from memprof.errors import UsageError
from memprof.instrument.child_processes import Children
from memprof.instrument.import_hook import when_imported
from memprof.integrations.run_recorder.run_folder import claim_folder, moved_sentence

if TYPE_CHECKING:
    from memprof.instrument.loop import PlainLoop

# Variables in which launchers say how many processes there are.
_WORLD_SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class ImportWatcher:
    """Wait for the script to import torch and transformers; without them do nothing. ``options`` are the callback's.

    ``children``: the processes that the script starts, if their trainers are to be recorded.
    """

    def __init__(self, options: Mapping[str, Any], children: Children | None = None) -> None:
        self._options = dict(options)
        self._children = children
        self._moved = ""
        if self._options.get("output_dir") is not None:
            self._options["output_dir"] = self._claimed(Path(self._options["output_dir"]))
        self._loop: PlainLoop | None = None
        self._trained = False

    def begin(self) -> None:
        """Wait for imports; nothing heavy is imported here."""
        from memprof.integrations.run_recorder import output

        output.LATER = []
        if self._children is not None:
            self._children.follow(self._options)
        when_imported("torch", self._torch)
        when_imported("transformers.trainer", self._trainer)
        when_imported("transformers.generation.utils", self._generation)

    def end(self, error: BaseException | None) -> None:
        """Report when the script is over; ``error`` ended it, or None."""
        from memprof.integrations.run_recorder.output import say, say_later

        if self._loop is not None:
            self._loop.end()
        if self.recorded and self._moved and os.environ.get("RANK", "0") == "0":
            say(self._moved, "stderr")
        say_later()

    def say_if_untouched(self) -> None:
        """Print after the end that nothing was recorded, if torch was used and the script recorded nothing itself."""
        from memprof.integrations.run_recorder.output import say

        used_torch, trained = (False, False) if self._children is None else self._children.did()
        if self.recorded or trained or not (self._loop is None or self._loop.untouched):
            return
        if used_torch:
            say(
                "memprof: nothing was recorded: no transformers.Trainer trained in the processes that the script "
                "started. Record other loops where they run: torchrun ... -m memprof run train.py.",
                "stderr",
            )
        elif self._loop is not None:
            say("memprof: nothing was recorded: no model ran in the steps that were to be recorded.", "stderr")

    @property
    def recorded(self) -> bool:
        """Tell whether a trainer trained, or a loop's steps were written."""
        return self._trained or (self._loop is not None and self._loop.recorded)

    def _torch(self, torch: ModuleType) -> None:
        from memprof.instrument.loop import PlainLoop
        from memprof.integrations.callback.options import Options

        if not self._trained:
            folder = self._options.get("output_dir") or self._claimed(Path(RUN_FOLDER))
            options = {name: value for name, value in self._options.items() if name != "table"}
            self._loop = PlainLoop(Options.of(**{**options, "output_dir": folder}), self._options.get("table", True))
            self._loop.begin()

    def _trainer(self, module: ModuleType) -> None:
        if (fault := fault_of(TRAINER_INIT)) is not None:
            raise UsageError(f"{fault}.")
        from memprof.instrument.launched_callback import give_callback

        give_callback(module, self._options, self._training)

    def _generation(self, module: ModuleType) -> None:
        if self._loop is not None:
            self._loop.watch_generation(module.GenerationMixin)

    def _claimed(self, folder: Path) -> Path:
        """Return the folder to write to, and remember what to say about it."""
        chosen = claim_folder(folder, not any(os.environ.get(name, "1") != "1" for name in _WORLD_SIZES))
        self._moved = moved_sentence(folder, chosen)
        return chosen

    def _training(self) -> None:
        """Leave a trainer to its callback: it sees more than a loop's hooks do."""
        self._trained = True
        if self._loop is not None:
            self._loop.loaded()
            self._loop.end()
            self._loop = None
            if self._options.get("output_dir") is None:
                self._moved = ""  # the loop's; the callback chooses a folder of its own
