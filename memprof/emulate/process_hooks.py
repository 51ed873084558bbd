"""Do inside a process on the emulated device what takes Python: others' kernels' values, and the early end.

``startup/sitecustomize.py`` calls :func:`attach` when Python starts, in every process of the command: the script's,
each rank's, a launcher's.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import sys
from types import ModuleType
from typing import Any

from memprof.emulate.after_import import when_imported
from memprof.emulate.build import VALUES
from memprof.emulate.early_stop import end_after
from memprof.emulate.notes import COMPUTED_PACKAGES
from memprof.emulate.triton_values import compute_launches, count_compiled

_UNDEFINED = re.compile(r"undefined symbol: ((?:cu|nvml|nccl|nvrtc)\w+)")

#: The environment variables that name a function to call in every process (``module:function``), and say after how many
#: optimizer steps to end.
CALL, STEPS = "MEMPROF_EMULATE_CALL", "MEMPROF_EMULATE_STEPS"

_attached = False


def attach(values: bool) -> None:
    """Wait for torch, Triton and transformers to be imported, and do what the environment asks for, once a process.

    A process that calls ``enter`` below one that did comes here twice; attached twice, it would compute every Triton
    kernel twice. ``values``: compute what Triton's and bitsandbytes' kernels would have written.
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
    when_imported("torch", _say_if_without_cuda)
    if call := os.environ.get(CALL):
        module, _, name = call.partition(":")
        getattr(importlib.import_module(module), name)()
    if steps := int(os.environ.get(STEPS, "0")):
        end_after(steps)


def compute_operators(package: ModuleType) -> None:
    """Let the CUDA operators that a package registered under its own name compute their values (bitsandbytes).

    Each then does what an operator of torch does on the emulated device: it runs, which asks for the memory, and its
    CPU kernel runs on that same memory (``native/values/operators.cpp``).
    """
    values = ctypes.CDLL(os.path.join(os.environ["MEMPROF_EMULATE_HOME"], VALUES))
    values.memprof_emulator_compute.argtypes = [ctypes.c_char_p]
    values.memprof_emulator_compute.restype = ctypes.c_size_t
    if values.memprof_emulator_compute(package.__name__.encode()):
        COMPUTED_PACKAGES.add(package.__name__)


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


def _say_if_without_cuda(torch: Any) -> None:
    if torch.version.cuda is None:
        print(
            f"memprof emulate: {sys.executable} has torch {torch.__version__}, which is built without CUDA: it sees no "
            "emulated GPU.", file=sys.stderr,
        )  # fmt: skip
