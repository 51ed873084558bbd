"""The state of a process that a recording must leave as it was."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import types
import warnings
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

#: Packages whose functions, classes and methods are compared one by one.
_PATCHED = ("torch", "transformers", "accelerate", "peft", "trl", "threading", "signal", "subprocess")
_HOOKS = [
    (owner, name)
    for owner in (torch.nn.modules.module, sys.modules["torch.optim.optimizer"])
    for name in vars(owner)
    if name.startswith("_global_") and name.endswith("hooks")
]
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, staticmethod, classmethod, property)


def of_this_thread() -> dict[str, Any]:
    """Return what torch and Python keep for each thread by itself."""
    return {
        "dispatch modes": [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()],
        "function modes": torch._C._len_torch_function_stack(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "tracing": (sys.gettrace(), sys.getprofile()),
        "saved tensors": torch._C._autograd._saved_tensors_hooks_is_enabled(),
    }


class Bystander:
    """A thread that is idle until it is asked for its state, after one operation."""

    def __init__(self) -> None:
        self._asked, self._answered = threading.Event(), threading.Event()
        self._answer: dict[str, Any] = {}
        torch.ones(1)
        threading.Thread(target=self._run, name="bystander", daemon=True).start()

    def _run(self) -> None:
        self._asked.wait(60)
        torch.ones(1)
        self._answer = of_this_thread()
        self._answered.set()

    def state(self) -> dict[str, Any]:
        """Return the thread's state, and end it."""
        self._asked.set()
        assert self._answered.wait(60)
        return self._answer


def fingerprint(*objects: object) -> dict[str, Any]:
    """Return what can be compared: hooks, modes, handlers, the environment, patched code, and ``objects``' own
    attributes."""
    return {
        "hooks": {name: list(getattr(owner, name)) for owner, name in _HOOKS},
        "this thread": of_this_thread(),
        "defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()),
        "allocator settings": torch._C._accelerator_getAllocatorSettings(),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "excepthooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "signal mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "tracing of threads": (threading.gettrace(), threading.getprofile()),
        "import": (list(sys.meta_path), list(sys.path_hooks), list(sys.path)),
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "collector": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),  # what is frozen, these tests change
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "objects": [dict(vars(one)) for one in objects],
        "code": _code(),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Name what is not as it was. Code that was only imported meanwhile does not count."""
    found = [name for name in before if name != "code" and before[name] != after[name]]
    code = after["code"]
    return found + [name for name, value in before["code"].items() if code.get(name, value) is not value]


def _code() -> dict[str, Any]:
    """Return the functions of the packages' modules and classes, by where they are."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in _PATCHED or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, _CODE):
                found[f"{name}.{key}"] = value
            elif isinstance(value, type) and value.__module__ == name:
                members = list(vars(value).items())
                found |= {f"{name}.{key}.{inner}": code for inner, code in members if isinstance(code, _CODE)}
    return found
