"""Run a training script's own lines up to ``trainer.train()``, in a process that has no weights, GPU or network."""

from __future__ import annotations

import contextlib
import math
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memprof.allocator.model import OutOfMemory
from memprof.compat import torch as torch_names
from memprof.config.settings import Settings
from memprof.errors import InputError, MemprofError
from memprof.simulate.recorder.session import FakeSession
from memprof.simulate.script.built_trainer import ScriptTrainer, Trained
from memprof.simulate.script.world import script_world
from memprof.simulate.trainer.checkpointing import offloading_to_host
from memprof.simulate.trainer.kv_caches import modelled_quanto
from memprof.simulate.trainer.training import selected_of
from memprof.simulate.trainer.trl_on_fakes import own_accelerate_state, quiet, trl_on_fakes

_HELP = "give its own arguments after --, as in --script train.py -- --config grpo.yaml"


class NotExecutable(Exception):
    """The script's trainer cannot run on fakes; ``settings`` say what it was, where that is known."""

    def __init__(self, reason: str, settings: Settings | None) -> None:
        super().__init__(reason)
        self.reason, self.settings = reason, settings


class ScriptRun:
    """Run one script with its command line's ``arguments``, and keep what it built and what there is to say of it."""

    def __init__(self, script: Path, arguments: Sequence[str], changes: Mapping[str, Any], device: str) -> None:
        self.script, self._arguments, self._changes, self._device = script, list(arguments), changes, device
        self.notes: list[str] = []
        self.trainer = ScriptTrainer(changes, device, self.notes)

    def selected(self, shape: tuple[int, ...]) -> int:
        """See :func:`memprof.simulate.trainer.training.selected_of`; what is not GRPO selects everything."""
        if self.trainer.settings is None:
            return math.prod(shape)
        answer: int = selected_of(self.trainer.settings)(shape)
        return answer

    def run(self, session: FakeSession) -> None:
        """Run the script; call it inside the fake world with tracking on.

        Raises:
            NotExecutable: the script, or its trainer, fails on fake tensors.
            InputError: it ends without training.
        """
        modes = list(torch_names.MODE_STACK.get()())
        basis = Settings(model="script", device=self._device, padding=self._changes.get("padding", "none"))
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="memprof-simulate-"))
            stack.enter_context(own_accelerate_state())
            stack.enter_context(quiet())
            stack.enter_context(trl_on_fakes(basis, None, session))
            stack.enter_context(modelled_quanto())
            if self._device == "cuda":
                stack.enter_context(offloading_to_host(session))
            stack.enter_context(script_world(self.notes.append, self._changes))
            stack.enter_context(self.trainer.intercepted(session, folder, modes))
            stack.enter_context(torch_names.NO_MODES.get()())
            self._run_script()

    def _run_script(self) -> None:
        saved, place = sys.argv, sys.path[0]
        sys.argv, sys.path[0] = [str(self.script), *self._arguments], str(self.script.resolve().parent)
        try:
            runpy.run_path(str(self.script), run_name="__main__")
        except Trained:
            return
        except (MemprofError, OutOfMemory):
            raise
        except SystemExit as end:
            raise InputError(f"{self.script.name}: it ended ({end.code}) before it trained; {_HELP}") from None
        except Exception as error:
            raise NotExecutable(self._reason(error), self.trainer.settings) from error
        finally:
            sys.argv, sys.path[0] = saved, place
        raise InputError(f"{self.script.name}: it ended without calling trainer.train(); {_HELP}")

    def _reason(self, error: Exception) -> str:
        """Say what failed, and at which line of the script."""
        line, trace = 0, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == str(self.script):
                line = trace.tb_lineno
            trace = trace.tb_next
        words = str(error).strip().partition("\n")[0][:160] or "no message"
        return f"line {line}: {type(error).__name__}: {words}"
