"""Trace a program that nobody here wrote: identity from what its objects do, not from what they are called."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from benchmarks.truth.scale import Scale
from benchmarks.truth.trace.harness import cuda_like, mark_caches
from benchmarks.truth.trace.tracer import Tracer


class RealScale(Scale):
    """Sizes as they ran; an extent is the vocabulary's or the hidden size where the row says so."""

    def __init__(self, vocabulary: Sequence[int], hidden: Sequence[int]) -> None:
        super().__init__({}, set(vocabulary), set(hidden), 1, set(), 0, {1}, {1})

    def extent(self, shape: tuple[int, ...], position: int) -> int:
        return shape[position]


class Roles:
    """What each model of a program turned out to be.

    A model that an optimizer trains is the policy (or a value model, where the row names its class); one that is
    only run is the reference if a trained model has its sizes, else a reward model.
    """

    def __init__(self, tracer: Tracer, value_models: Sequence[str]) -> None:
        self.tracer, self.value_models = tracer, value_models
        self.trained: set[int] = set()
        self.roots: dict[int, tuple[str, list[tuple[str, int, tuple[int, ...], bool]]]] = {}
        self.modules: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._depth = threading.local()

    def saw(self, module: torch.nn.Module) -> None:
        """Note a model that the program calls, and the storages of its tensors."""
        if not any(module is known for known in self.modules):
            self.modules.append(module)
        found = self.roots.setdefault(id(module), (type(module).__name__, []))[1]
        known = {number for _, number, _, _ in found}
        tensors = [(n, t, False) for n, t in module.named_parameters(remove_duplicate=False)]
        tensors += [(n, t, True) for n, t in module.named_buffers(remove_duplicate=False)]
        for name, tensor, is_buffer in tensors:
            number = self.tracer.number_of(tensor)
            if number is not None and number not in known:
                found.append((name, number, tuple(tensor.shape), is_buffer))

    def after_backward(self) -> None:
        """Mark gradients of every parameter known by now."""
        parameters = [(n, p) for m in self.modules for n, p in m.named_parameters()]
        parameters += [("p", p) for o in self.optimizers for g in o.param_groups for p in g["params"]]
        self.tracer.mark_gradients(parameters)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark the state of an optimizer, and what it trains."""
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)
        self.tracer.mark_optimizer(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                number = self.tracer.number_of(parameter)
                if number is not None:
                    self.trained.add(number)

    def settle(self) -> None:
        """Mark every model's tensors by what the whole run showed."""
        trained = [shapes for _, shapes in self.roots.values() if any(n in self.trained for _, n, _, _ in shapes)]
        for kind, tensors in self.roots.values():
            category = "weights"
            is_trained = any(number in self.trained for _, number, _, _ in tensors)
            if kind in self.value_models:
                category = "value_model"
            elif not is_trained and trained:
                shapes = sorted(shape for _, _, shape, is_buffer in tensors if not is_buffer)
                alike = any(shapes == sorted(s for _, _, s, b in other if not b) for other in trained)
                category = "reference_model" if alike else "reward_model"
            for name, number, _, _ in tensors:
                storage = self.tracer.storages[number]
                is_adapter = category == "weights" and "lora_" in name
                if storage.mark is None or storage.mark[0] == "weights":
                    storage.mark = ("adapters" if is_adapter else category, name)
        for number in self.trained:
            if self.tracer.storages[number].mark is None:
                self.tracer.storages[number].mark = ("weights", "parameter")


def trace_program(run: Callable[[Tracer], Any], value_models: Sequence[str]) -> Tracer:
    """Run a program under a tracer and mark what its tensors were.

    Args:
        run: runs the program; it may mark more (a cache of the program's own).
        value_models: classes whose trained parameters are a critic's.
    """
    tracer = Tracer()
    roles = Roles(tracer, value_models)
    with contextlib.ExitStack() as stack:
        stack.enter_context(cuda_like(tracer))

        def swap(target: Any, name: str, new: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, new))

        _patch_calls(tracer, roles, swap)
        stack.enter_context(_hooked(tracer, roles))
        stack.enter_context(tracer)
        stack.enter_context(tracer.switched(True))
        with contextlib.suppress(SystemExit):
            run(tracer)
    roles.settle()
    # A recording ends while the program's objects live; what is freed after the last birth is the program's end.
    del tracer.events[max(i for i, event in enumerate(tracer.events) if event[0] == "a") + 1 :]
    return tracer


def _patch_calls(tracer: Tracer, roles: Roles, swap: Callable[[Any, str, Any], None]) -> None:
    """Watch calls of models, backward passes, ``zero_grad`` and transformers' caches."""
    called = torch.nn.Module.__call__
    depth = threading.local()

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        inside = getattr(depth, "n", 0)
        if inside or tracer.in_backward:
            return called(self, *args, **kwargs)
        if tracer.phase == "load" and any(True for _ in self.parameters()):
            tracer.set_base_phase("other")
            tracer.note("train")
        roles.saw(self)
        depth.n = 1
        try:
            if not torch.is_grad_enabled():
                return called(self, *args, **kwargs)
            with tracer.within("forward"):
                return called(self, *args, **kwargs)
        finally:
            depth.n = 0

    swap(torch.nn.Module, "__call__", call)
    for owner in (torch.Tensor, torch.autograd):
        swap(owner, "backward", tracer.wrap_phase(owner.backward, "backward", lambda *_: roles.after_backward()))
    zero = torch.optim.Optimizer.zero_grad
    swap(torch.optim.Optimizer, "zero_grad", tracer.wrap_phase(zero, "optimizer_step"))
    with contextlib.suppress(ImportError):
        mark_caches(tracer, swap)


@contextlib.contextmanager
def _hooked(tracer: Tracer, roles: Roles) -> Iterator[None]:
    """Annotate every optimizer's steps as CUDA histories do, and mark state when a step ends."""

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        roles.after_step(optimizer)
        tracer.note(f"START:Optimizer.step#{type(optimizer).__name__}.step")
        tracer._phases.append("optimizer_step")

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        tracer._phases.pop()
        tracer.note(f"END:Optimizer.step#{type(optimizer).__name__}.step")
        roles.after_step(optimizer)

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
