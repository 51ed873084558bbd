"""Step an optimizer whose state has no room on the device: one parameter at a time, its state in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

from memprof.grpo.step.out_of_memory import Adaptation, end, is_out_of_memory
from memprof.grpo.techniques.rounding import StochasticAdamW

_HOST = torch.device("cpu")


class RetryingStep:
    """Replace an optimizer's ``step`` by one that survives running out of memory while AdamW's moments are made.

    That is in a run's first step, before anything is changed. The cache is given back and the step repeated; if that
    fails, the state moves to host memory for the rest of the run, and each parameter steps by itself with its own on
    the device. The weights are the same: torch's fused AdamW and :class:`StochasticAdamW` treat parameters one by one,
    and make the state of a group before they update it. Other optimizers, and later steps, end in a sentence.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, adaptation: Adaptation) -> None:
        self._optimizer, self._step, self._adaptation = optimizer, optimizer.step, adaptation
        self._on_host: dict[torch.Tensor, list[str]] | None = None

    @classmethod
    def put_in(cls, optimizer: torch.optim.Optimizer, adaptation: Adaptation) -> RetryingStep:
        """Replace ``optimizer.step``; it stays a method, because a learning-rate scheduler wraps it."""
        surviving = cls(optimizer, adaptation)

        def step(_: torch.optim.Optimizer, closure: Any = None) -> Any:
            return surviving(closure)

        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        return surviving

    def __call__(self, closure: Any = None) -> Any:
        """Step as the optimizer does."""
        state, groups = self._optimizer.state, self._optimizer.param_groups
        to_step = [[p for p in group["params"] if p.grad is not None] for group in groups]
        makes_state = any(not state.get(parameter) for group in to_step for parameter in group)
        if closure is not None or not _can_repeat(self._optimizer) or not (makes_state or self._on_host is not None):
            return self._as_ever(closure)
        waiting = [group for group in to_step if group]
        for group in waiting if self._on_host is not None else self._left_by_a_step(waiting):
            if self._on_host is not None or not self._together(group):
                self._singly(group)
        return None

    def park(self) -> bool:
        """Move the state to host memory for the rest of the run, for a piece that has no room beside it; False where it
        holds none or cannot step there."""
        state = self._optimizer.state
        if self._on_host is not None or not state or not _can_repeat(self._optimizer):
            return False
        self._on_host = {}
        for parameter in state:
            self._to_host(parameter)
        return True

    def _as_ever(self, closure: Any) -> Any:
        try:
            return self._step(closure)
        except torch.OutOfMemoryError as error:
            name = type(self._optimizer).__name__
            raise end(str(error), f"in a step of {name}, which had begun to change weights: set optim="
                                  "'adamw_torch_fused', which needs no temporary memory") from None  # fmt: skip

    def _left_by_a_step(self, groups: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Step as the optimizer does; return the groups of parameters that memory had no room to step."""
        had = any(p in self._optimizer.state for group in groups for p in group)
        try:
            self._step()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            left = [group for group in groups if not any(map(self._steps_of, group))]
            # Groups before one whose state was being made have been stepped as a whole.
            making = any(self._lacks_moments(p) for group in left for p in group)
            if had or (len(left) < len(groups) and not making):
                raise _begun(error) from None
        else:
            return []
        self._forget(left)
        self._adaptation.log.warn("out of memory in the optimizer's step: it runs again after freeing cached memory")
        return left

    def _together(self, group: list[torch.Tensor]) -> bool:
        """Step the parameters of one group; tell whether there was room."""
        try:
            with _gradients_of(self._optimizer, group):
                self._step()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if any(map(self._steps_of, group)):
                raise _begun(error) from None
        else:
            return True
        self._forget([group])
        self._adaptation.log.warn(
            "out of memory in the optimizer's step: its state stays in host memory from here on, and passes over the "
            "device one parameter at a time in every step (optim='adamw_8bit' has a quarter of it)"
        )
        self._on_host = {}
        return False

    def _steps_of(self, parameter: torch.Tensor) -> int:
        return int(self._optimizer.state.get(parameter, {}).get("step", 0))

    def _lacks_moments(self, parameter: torch.Tensor) -> bool:
        """Tell whether the state of a parameter was begun and is not complete."""
        return parameter in self._optimizer.state and "exp_avg_sq" not in self._optimizer.state[parameter]

    def _forget(self, groups: list[list[torch.Tensor]]) -> None:
        """Drop the state of parameters that were not stepped: it may have one moment of two, all zeros."""
        for parameter in (p for group in groups for p in group):
            self._optimizer.state.pop(parameter, None)
        self._adaptation.again += 1
        self._adaptation.clear()

    def _singly(self, group: list[torch.Tensor]) -> None:
        for parameter in self._optimizer.state:
            self._to_host(parameter)
        assert self._on_host is not None
        for parameter in group:
            state = self._optimizer.state.get(parameter, {})
            state.update({name: state[name].to(parameter.device) for name in self._on_host.get(parameter, ())})
            try:
                with _gradients_of(self._optimizer, [parameter]):
                    self._step()
            except torch.OutOfMemoryError as error:
                raise end(str(error), "in the optimizer's step of a single parameter: use a larger GPU") from None
            self._to_host(parameter)

    def _to_host(self, parameter: torch.Tensor) -> None:
        assert self._on_host is not None
        state = self._optimizer.state[parameter]
        here = [k for k, value in state.items() if isinstance(value, torch.Tensor) and value.device == parameter.device]
        if here and parameter.device != _HOST:
            self._on_host[parameter] = here
            state.update({name: state[name].to(_HOST) for name in here})


def _begun(error: BaseException) -> torch.OutOfMemoryError:
    return end(str(error), "in an optimizer step that had begun to change weights: use a larger GPU")


@contextmanager
def _gradients_of(optimizer: torch.optim.Optimizer, wanted: Sequence[torch.Tensor]) -> Iterator[None]:
    """Hide all other parameters' gradients, so that the optimizer steps only the ``wanted`` ones."""
    kept, others = set(wanted), list[tuple[torch.Tensor, torch.Tensor]]()
    for group in optimizer.param_groups:
        others += [(p, p.grad) for p in group["params"] if p.grad is not None and p not in kept]
    for parameter, _ in others:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in others:
            parameter.grad = gradient


def _can_repeat(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer makes the state of a group first, and then treats its parameters one by one."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return type(optimizer) is StochasticAdamW or (type(optimizer) in (torch.optim.AdamW, torch.optim.Adam) and fused)
