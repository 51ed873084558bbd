"""Compute what Triton kernels would have written, on the memory they were given: they are compiled, and launch nothing.

A kernel ``_x_kernel`` whose module has its equal in torch operations beside it, as ``_x_tile`` with the same
parameters, is computed by that: TRL's and memprof's own kernels have one. Any other runs in Triton's interpreter, where
its grid is small. What remains uncomputed is counted by name, and noted in recordings: kernels that ``torch.compile``
made among them, which are not computed at all.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from memprof.compat.targets import ABSENT, look_up
from memprof.compat.torch import COMPILED_LAUNCH
from memprof.emulate.notes import UNCOMPUTED, values_max

# The interpreter takes about 10 ms a program.
_MOST_PROGRAMS = 1024


def compute_launches(module: ModuleType) -> None:
    """Let every launch of a kernel compute its values too; ``module``: ``triton.runtime.jit``."""
    launch = module.JITFunction.run

    @functools.wraps(launch)
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        launched = launch(self, *args, grid=grid, warmup=warmup, **kwargs)
        if not warmup:
            _compute(self, args, grid, kwargs)
        return launched

    module.JITFunction.run = run


def count_compiled(_: ModuleType) -> None:
    """Count every launch of a kernel that ``torch.compile`` made; a torch where that has another name is left alone."""
    launch = COMPILED_LAUNCH.find()
    if launch is ABSENT:
        return
    owner, name = look_up(COMPILED_LAUNCH.module, COMPILED_LAUNCH.path.rpartition(".")[0]), COMPILED_LAUNCH.name

    @functools.wraps(launch)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched = launch(self, *args, **kwargs)
        if not kwargs.get("benchmark_run"):
            UNCOMPUTED[f"{self.fn.__name__} of torch.compile"] += 1
        return launched

    setattr(owner, name, run)


def _compute(kernel: Any, args: Sequence[Any], grid: Any, kwargs: Mapping[str, Any]) -> None:
    import torch

    signature = inspect.signature(kernel.fn)
    bound = signature.bind(*args, **{name: value for name, value in kwargs.items() if name in signature.parameters})
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor) and value.is_cuda]
    most = values_max()
    name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
    if any(tensor.numel() > most for tensor in tensors):
        UNCOMPUTED[name] += 1
        return
    on_host = {key: _on_host(value) if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}
    plain = _plain_version(kernel.fn, len(signature.parameters))
    with torch.no_grad():
        if plain is not None:
            plain(*on_host.values())
        elif not _interpret(kernel, on_host, grid(arguments) if callable(grid) else grid):
            UNCOMPUTED[name] += 1


def _plain_version(kernel: Callable[..., Any], parameters: int) -> Callable[..., Any] | None:
    """Return the kernel's equal in torch operations from its own module, or None."""
    name: str = kernel.__name__
    if not name.endswith("_kernel"):
        return None
    found = getattr(sys.modules.get(kernel.__module__), name.removesuffix("kernel") + "tile", None)
    if not callable(found) or len(inspect.signature(found).parameters) != parameters:
        return None
    plain: Callable[..., Any] = found
    return plain


def _on_host(tensor: Any) -> Any:
    """Return a CPU tensor over the same memory; the emulated device's is this process's own."""
    import ctypes

    import torch

    if not tensor.is_cuda:
        return tensor
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_char * (extent * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _interpret(kernel: Any, arguments: Mapping[str, Any], grid: Sequence[int]) -> bool:
    """Run the kernel in Triton's interpreter; False where its grid is too large or it cannot be interpreted."""
    programs = functools.reduce(lambda a, b: a * b, grid, 1)
    if programs > _MOST_PROGRAMS:
        return False
    from triton import language
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def call(device_function: Any, *args: Any, **kwargs: Any) -> Any:
        # Not by calling the interpreted one: that would replace Triton's language for good.
        return InterpretedFunction(device_function.fn).rewrite()(*args, **kwargs)

    # The interpreter replaces, for as long as a kernel runs, the modules of the language that the kernel's own module
    # names; what Triton's own device functions use (tl.sum, tl.sigmoid) is the core.
    seen, name, before = kernel.fn.__globals__, "memprof_emulated_core", JITFunction.__call__
    seen[name] = language.core
    JITFunction.__call__ = call
    try:
        InterpretedFunction(kernel.fn).run(**arguments, grid=tuple(grid), warmup=False)
    except Exception as error:
        if os.environ.get("MEMPROF_EMULATE_TRACE", "0") != "0":
            print(f"memprof values: {kernel.fn.__name__} cannot be interpreted: {error!r}", file=sys.stderr)
        return False
    finally:
        JITFunction.__call__ = before
        del seen[name]
    return True
