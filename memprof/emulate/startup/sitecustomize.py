"""Load the emulator's values right after torch was imported, and record: Python runs this file when it starts.

It stands first on PYTHONPATH of every process that :mod:`memprof.emulate.launch`, or a script under ``memprof run``,
starts, so it runs the environment's own ``sitecustomize`` too, which it hides.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
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


def _when_imported() -> Any:
    """Load the file beside this folder by its path: this Python may have no memprof."""
    path = os.path.join(os.path.dirname(_HERE), "after_import.py")
    spec = importlib.util.spec_from_file_location("memprof_emulate_after_import", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.when_imported


def _torch_is_there(torch: Any) -> None:
    torch.backends.cudnn.enabled = False  # there is no cuDNN: torch's own kernels convolve
    if _wants_values() and torch.version.cuda:
        folder = os.environ["MEMPROF_EMULATE_HOME"]
        torch.ops.load_library(os.path.join(folder, "libmemprof_emulator_values.so"))


def _attach() -> None:
    """Record, and compute Triton's kernels; a Python that has no memprof does neither, and says so."""
    try:
        from memprof.emulate.process_hooks import attach
    except ImportError as error:
        print(f"memprof emulate: {sys.executable} has no memprof ({error}); it is not recorded.", file=sys.stderr)
    else:
        attach(values=_wants_values())


def _call_named(_torch: Any) -> None:
    """Call what `memprof run` asks for, ``module:function``; a Python that has no memprof records nothing, which that
    command reports at its end."""
    module, _, name = os.environ["MEMPROF_RUN_CALL"].partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except ImportError:
        return
    function()


def _wants_values() -> bool:
    return os.environ.get("MEMPROF_EMULATE_VALUES", "0") not in ("", "0")


if os.environ.get("MEMPROF_EMULATE_HOME"):
    _when_imported()("torch", _torch_is_there)
    _attach()
elif os.environ.get("MEMPROF_RUN_CALL"):
    _when_imported()("torch", _call_named)  # memprof takes a third of a second to import, most processes need none
if __name__ == "sitecustomize":  # not where memprof.emulate.launch.enter runs it in a process that has begun
    _run_hidden()
