"""Record what a command does on an emulated device: ``memprof emulate`` asks for it by this module's name."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from memprof.emulate.process_hooks import CALL
from memprof.instrument.import_hook import when_imported
from memprof.instrument.run import ImportWatcher
from memprof.recording.api import switched_off
from memprof.recording.guard import FailureGuard, on_stderr

#: The environment variable with the callback's options, as JSON.
OPTIONS = "MEMPROF_EMULATE_RECORD"


def asked(options: Mapping[str, Any]) -> dict[str, str]:
    """Return what to put into the environment of an emulated command, so that each of its processes is recorded."""
    return {CALL: f"{__name__}:record", OPTIONS: json.dumps(options)}


def record() -> None:
    """Record this process as ``memprof run`` does, once a model trains in it."""
    if switched_off():
        return
    attachment = ImportWatcher(json.loads(os.environ[OPTIONS]))
    finish = FailureGuard("script", "the report of what it did on the emulated GPU", on_stderr).hook(_finish)

    def at_exit(torch: Any) -> None:
        atexit.register(finish, attachment, torch)

    # Before torch's own: exit handlers run backwards, and the report needs torch.
    when_imported("torch", at_exit)
    attachment.begin()


def _finish(attachment: ImportWatcher, torch: Any) -> None:
    """Report, or say why there is nothing to report: a script that used the card must not end without a word."""
    attachment.end(None)
    if torch.cuda.is_initialized() and not attachment.recorded and os.environ.get("RANK", "0") == "0":
        print("memprof emulate: nothing was recorded: no model's forward ran on the GPU.", file=sys.stderr, flush=True)
