"""Enter torch's fake mode, in which tensors have shapes and no values, and replace what must give way for it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count
from typing import Any

import torch
from torch import nn

from memprof.compat import patching
from memprof.compat import torch as torch_names
from memprof.compat import transformers as transformers_names
from memprof.compat.patching import replacing
from memprof.simulate.fake_cuda.autocast import cuda_autocast
from memprof.simulate.fake_cuda.sdpa_kernels import DEFAULT_CAPABILITY, cuda_attention
from memprof.snapshot.columns import collector_paused

_FakeTensor: Any = torch_names.FAKE_TENSOR.get()
_worlds = count()  # opened so far


@contextmanager
def fake_world(
    *,
    cuda: bool = True,
    attention: str | None = None,
    capability: tuple[int, int] = DEFAULT_CAPABILITY,
    tell: Callable[[str], None] = lambda why: None,
) -> Iterator[Any]:
    """Enter torch's fake mode, with CUDA's autocast and, on a card of this ``capability``, attention where ``cuda``.

    ``tell`` hears why attention is computed in full.

    Garbage is not collected inside unless somebody asks for it: storages must go when their last reference does, as
    they would on a device, and never in the middle of the allocator's own work.
    """
    with ExitStack() as stack:
        stack.enter_context(_modes_kept())
        stack.enter_context(
            patching(
                (torch_names.MODULE_APPLY, _apply),
                (torch_names.INFERENCE_MODE, _inference_mode),
                (torch_names.PROFILED, _itself),  # a mark for torch's profiler costs as much as an operation here
                (torch_names.PROFILED_END, _nothing),
            )
        )
        stack.enter_context(replacing(*_tracing_questions()))
        if cuda:
            stack.enter_context(cuda_autocast())
            replaced = (torch_names.ATTENTION, cuda_attention(attention, capability, tell))
            stack.enter_context(patching(replaced, (torch_names.DROPOUT, _cuda_dropout(torch_names.DROPOUT.get()))))
        mode = torch_names.FAKE_MODE.get()(allow_non_fake_inputs=True)
        stack.enter_context(_uncollected())
        stack.enter_context(mode)
        yield mode


@contextmanager
def _modes_kept() -> Iterator[None]:
    """Put gradients' and autocast's modes back: an error on the way out of autocast leaves it switched on."""
    gradients, kept = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    modes = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")}
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    try:
        yield
    finally:
        torch.autocast_increment_nesting()
        while torch.autocast_decrement_nesting() > depth:
            pass
        torch.set_autocast_cache_enabled(kept)
        for kind, (enabled, dtype) in modes.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_grad_enabled(gradients)
        if not depth:
            torch.clear_autocast_cache()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the garbage collector, and let those who call it (accelerate does) look through what is made inside only.

    All that was imported is frozen meanwhile: looking through it takes a third of a second each time.
    """
    if next(_worlds):  # what an earlier one left in circles
        gc.collect()
    ours = not gc.get_freeze_count()
    with collector_paused():
        if ours:
            gc.freeze()
        try:
            yield
        finally:
            if ours:
                gc.unfreeze()


def _itself(self: Any) -> Any:
    return self


def _nothing(self: Any, exc_type: Any, exc_value: Any, traceback: Any) -> None: ...


def _cuda_dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make a dropout of one kernel, which keeps a mask of a byte an element; the CPU's keeps noise as wide as it is."""

    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not training or inplace or not 0 < p < 1 or not input.numel():
            return original(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    return dropout


def _tracing_questions() -> list[tuple[Any, str, Any]]:
    """transformers takes fake tensors for a graph being traced and leaves the eager path for them; its modules import
    the question by name."""
    name = transformers_names.IS_TRACING.name
    modules = [m for place, m in list(sys.modules.items()) if place.startswith("transformers.") and name in vars(m)]
    return [(module, name, _never) for module in modules]


def _inference_mode(mode: Any = True) -> Any:
    """Enter ``no_grad`` instead: it holds the same memory, and composite operations are still taken apart before a
    dispatch mode sees them."""
    if callable(mode):
        return torch.no_grad()(mode)
    return torch.no_grad() if mode else nullcontext()


def _never(*_: Any, **__: Any) -> bool:
    return False


def _apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """Convert a module as torch does, but swap nothing: a tensor that changed is put in the old one's place."""
    if recurse:
        for child in self.children():
            torch_names.MODULE_APPLY.of(child)(fn)
    parameters, buffers = _tables(self)
    for name, parameter in parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            moved = fn(parameter)
        if moved is not parameter and not _same(moved, parameter):
            parameters[name] = nn.Parameter(moved, parameter.requires_grad)
    for name, buffer in buffers.items():
        if buffer is not None:
            buffers[name] = fn(buffer)
    return self


def _tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dicts of a module's own parameters and buffers, for changing them."""
    return torch_names.MODULE_PARAMETERS.of(module), torch_names.MODULE_BUFFERS.of(module)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    key = torch_names.STORAGE_KEY.of
    return key(one.untyped_storage()) == key(other.untyped_storage()) and one.dtype == other.dtype


def materialize(model: nn.Module, device: torch.device | None = None, *, first: Iterable[torch.Tensor] = ()) -> None:
    """Give every parameter and buffer that is on ``meta`` a fake tensor of its own, tied ones the same.

    ``first``: those of them that get theirs before the others, in this order.
    """
    _replace_tensors(model, lambda tensor: tensor.device.type == "meta", device or torch.device("cpu"), first)


def as_fakes(model: nn.Module) -> None:
    """Give every parameter and buffer a fake tensor, tied ones the same; call it inside the fake world."""
    _replace_tensors(model, lambda tensor: not isinstance(tensor, _FakeTensor), None)


def _replace_tensors(
    model: nn.Module,
    wanted: Callable[[Any], bool],
    device: torch.device | None,
    first: Iterable[torch.Tensor] = (),
) -> None:
    seen: dict[int, Any] = {id(tensor): (_made_like(tensor, device), tensor) for tensor in first}
    for module in model.modules():
        for table in _tables(module):
            for name, tensor in table.items():
                if tensor is None or not wanted(tensor):
                    continue
                if id(tensor) not in seen:
                    seen[id(tensor)] = (_made_like(tensor, device), tensor)  # the old one too: its id stays its own
                table[name] = seen[id(tensor)][0]


def _made_like(tensor: Any, device: torch.device | None) -> Any:
    made: Any = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=device)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
