"""Load the emulator's values right after torch was imported, and record: Python runs this file when it starts.

It stands first on PYTHONPATH of every process :mod:`memprof.emulate.launch` starts, so it runs the environment's own
``sitecustomize`` too, which it hides.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_hidden() -> None:
    """Run the next ``sitecustomize`` of the path, under its own name."""
    path = [folder for folder in sys.path if os.path.abspath(folder or os.getcwd()) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Lets the others find torch, and adds a step after its execution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _torch_is_there(module)

        loader.exec_module = exec_module
        return spec


def _torch_is_there(torch: Any) -> None:
    torch.backends.cudnn.enabled = False  # there is no cuDNN: torch's own kernels convolve
    if _wants_values() and torch.version.cuda:
        folder = os.environ["MEMPROF_EMULATE_HOME"]
        torch.ops.load_library(os.path.join(folder, "libmemprof_emulator_values.so"))


def _attach() -> None:
    """Record, and compute Triton's kernels; a Python that has no memprof does neither, and says so."""
    try:
        from memprof.emulate.child import attach
    except ImportError as error:
        print(f"memprof emulate: {sys.executable} has no memprof ({error}); it is not recorded.", file=sys.stderr)
    else:
        attach(values=_wants_values())


def _wants_values() -> bool:
    return os.environ.get("MEMPROF_EMULATE_VALUES", "0") not in ("", "0")


if os.environ.get("MEMPROF_EMULATE_HOME"):
    sys.meta_path.insert(0, _AfterTorch())
    _attach()
if __name__ == "sitecustomize":  # not where memprof.emulate.launch.enter runs it in a process that has begun
    _run_hidden()
