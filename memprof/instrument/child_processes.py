"""Record trainers in the Python processes that a script under ``memprof run`` starts: launchers train in those.

Python runs ``memprof/emulate/startup/sitecustomize.py`` when such a process starts, which calls :func:`record` once
torch is imported. Only trainers are recorded there: a loop's hooks would also record engines, reward servers and data
loaders.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from memprof import emulate
from memprof.instrument.import_hook import when_imported
from memprof.recording.api import switched_off
from memprof.recording.guard import FailureGuard, on_stderr

# The environment variables with what to call in a child, and with the callback's options and the file of
# :class:`Children`, as JSON.
_CALL, _FOLLOWED = "MEMPROF_RUN_CALL", "MEMPROF_RUN_CHILDREN"
_STARTUP = Path(emulate.__file__).parent / "startup"
_USED_TORCH, _TRAINED = "torch", "trained"


class Children:
    """Processes that the script starts: set up their environment, and read what they did from a temporary file."""

    def __init__(self) -> None:
        # Made by the first process that imports torch; most scripts start none.
        self._file = Path(tempfile.gettempdir()) / f"memprof-run-{secrets.token_hex(8)}"

    def follow(self, options: Mapping[str, Any]) -> None:
        """Record the trainers of processes that are started from now on; ``options`` are the callback's."""
        folder = options.get("output_dir")
        given = {**options, "output_dir": None if folder is None else os.path.abspath(folder)}
        os.environ[_CALL] = f"{__name__}:record"
        os.environ[_FOLLOWED] = json.dumps([given, str(self._file)])
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_STARTUP), before]))

    def did(self) -> tuple[bool, bool]:
        """Return whether one of them imported torch, and whether a trainer trained in one; the file is deleted."""
        try:
            lines = self._file.read_text(encoding="utf-8").split()
            self._file.unlink()
        except OSError:
            return False, False
        return _USED_TORCH in lines, _TRAINED in lines


def record() -> None:
    """Record the trainers of this process, which a script under ``memprof run`` has started; torch is imported."""
    if not switched_off():
        FailureGuard("script", "the trainers of this process", on_stderr)(_record, *json.loads(os.environ[_FOLLOWED]))


def _record(options: dict[str, Any], file: str) -> None:
    def note(what: str) -> None:
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(f"{what}\n")

    def trainer(module: ModuleType) -> None:
        from memprof.instrument.launched_callback import give_callback

        give_callback(module, options, lambda: note(_TRAINED))

    note(_USED_TORCH)
    when_imported("transformers.trainer", trainer)
