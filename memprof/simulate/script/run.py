"""Run a training script's own lines up to ``trainer.train()``, in a process that has no weights, GPU or network."""

from __future__ import annotations

import ast
import contextlib
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from memprof.allocator.model import AllocatorOutOfMemory
from memprof.compat import torch as torch_names
from memprof.config.gpus import Gpu
from memprof.config.settings import Settings
from memprof.config.trainer_fields import Unsimulated
from memprof.errors import InputError, MemprofError, UsageError
from memprof.simulate.recorder.session import FakeSession
from memprof.simulate.script.built_trainer import ScriptTrainer, TrainingSimulated
from memprof.simulate.script.cuda_answers import cuda_answers
from memprof.simulate.script.world import script_world
from memprof.simulate.trainer.checkpointing import offloading_to_host
from memprof.simulate.trainer.kv_caches import modelled_quanto
from memprof.simulate.trainer.training import selected_of
from memprof.simulate.trainer.trl_on_fakes import own_accelerate_state, quiet, trl_on_fakes

_HELP = "give its own arguments after --, as in --script train.py -- --config grpo.yaml"


# What a script's except clauses call first; how many exceptions an error names.
_CAUGHT, _MOST_CAUGHT = "__memprof_caught__", 3
_LONGEST = 400  # characters of an exception's words


class NotExecutable(Exception):
    """The script's trainer cannot run on fakes; ``settings`` say what it was, where that is known."""

    def __init__(self, reason: str, settings: Settings | None) -> None:
        super().__init__(reason)
        self.reason, self.settings = reason, settings


class ScriptRun:
    """Run one script with its command line's ``arguments``, and keep what it built and what there is to say of it."""

    def __init__(
        self,
        script: Path,
        arguments: Sequence[str],
        changes: Mapping[str, Any],
        device: str,
        gpu: Gpu | None = None,
        allow_unsimulated: bool = False,
    ) -> None:
        self.script, self._arguments, self._changes, self._device = script, list(arguments), changes, device
        self._gpu, self._allow_unsimulated = gpu, allow_unsimulated
        self.notes: list[str] = []
        self.left_out: list[str] = []
        self._caught: list[str] = []
        self._refused: UsageError | None = None
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
            stack.enter_context(script_world(self.notes.append, self._changes, self._leave_out))
            if self._device == "cuda":
                stack.enter_context(cuda_answers(self._gpu, self.script))
            stack.enter_context(self.trainer.intercepted(session, folder, modes))
            stack.enter_context(torch_names.NO_MODES.get()())
            self._run_script()

    def _leave_out(self, fields: Sequence[Unsimulated]) -> None:
        """Keep the names of fields that the script sets and that are not simulated.

        Raises:
            UsageError: they are not to be left out.
        """
        if fields and not self._allow_unsimulated:
            told = " ".join(field.sentence() for field in fields)
            self._refused = UsageError(
                f"{self.script.name}: {told} Add --allow-unsimulated to leave this out and widen the stated range."
            )
            raise self._refused
        self.left_out += [field.name for field in fields if field.name not in self.left_out]
        self.notes += [field.sentence() for field in fields]

    def _run_script(self) -> None:
        saved, place, main = sys.argv, sys.path[0], sys.modules["__main__"]
        sys.argv, sys.path[0] = [str(self.script), *self._arguments], str(self.script.resolve().parent)
        self._refused = None
        try:
            module = ModuleType("__main__")
            module.__file__ = str(self.script)
            vars(module)[_CAUGHT] = self._catch
            sys.modules["__main__"] = module
            exec(_noting_exceptions(self.script), vars(module))
        except TrainingSimulated:
            return
        except (MemprofError, AllocatorOutOfMemory):
            raise
        except SystemExit as end:
            if self._refused is not None:
                raise self._refused from None
            why = f"it ended ({end.code}) before it trained"
            raise InputError(f"{self.script.name}: {why}{self._caught_words()}; {_HELP}") from None
        except Exception as error:
            raise NotExecutable(self._reason(error), self.trainer.settings) from error
        finally:
            sys.argv, sys.path[0], sys.modules["__main__"] = saved, place, main
        if self._refused is not None:  # which the script caught
            raise self._refused
        raise InputError(f"{self.script.name}: it ended without calling trainer.train(){self._caught_words()}; {_HELP}")

    def _catch(self) -> None:
        """Note the exception that an ``except`` of the script has just caught."""
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and (words := self._reason(error)) not in self._caught:
            self._caught.append(words)

    def _caught_words(self) -> str:
        return f", and caught {' and '.join(self._caught[-_MOST_CAUGHT:])}" if self._caught else ""

    def _reason(self, error: Exception) -> str:
        """Say what failed, and at which line of the script."""
        line, trace = 0, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == str(self.script):
                line = trace.tb_lineno
            trace = trace.tb_next
        words = str(error).strip().partition("\n")[0][:_LONGEST].rstrip(". ") or "no message"
        return f"line {line}: {type(error).__name__}: {words}"


class _Noting(ast.NodeTransformer):
    """Let every ``except`` clause note its exception first."""

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self.generic_visit(node)
        call = ast.Expr(ast.Call(ast.Name(_CAUGHT, ast.Load()), [], []))
        node.body.insert(0, ast.fix_missing_locations(ast.copy_location(call, node)))
        return node


def _noting_exceptions(script: Path) -> CodeType:
    """Compile a script whose ``except`` clauses note what they catch.

    Raises:
        InputError: the script is not Python.
    """
    try:
        tree = ast.parse(script.read_bytes(), str(script))
        return compile(_Noting().visit(tree), str(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError, UnicodeDecodeError) as error:
        raise InputError(f"{script.name}: it is not valid Python ({error}).") from None
