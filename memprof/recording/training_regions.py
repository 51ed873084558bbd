"""In which part of a step a tensor is made: a forward, a backward, a recomputation, an optimizer's step, none of them.

For recorders that see tensors being made (the tensor trace, the simulator); stays on the thread that makes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from memprof.vocabulary import Phase

__all__ = [
    "TRAIN",
    "Region",
    "TrainingPhases",
]

_graph_task = torch._C._current_graph_task_id
_OPTIMIZER_STEP = Phase.OPTIMIZER_STEP.value


class Region:
    """Knows, from hooks that exist between ``start`` and ``stop``, whether an optimizer steps."""

    def __init__(self) -> None:
        self._depth = 0
        self._handles: list[Any] = []

    def start(self) -> None:
        from torch.optim import optimizer as hooks

        self._handles = [
            hooks.register_optimizer_step_pre_hook(self._enter),
            hooks.register_optimizer_step_post_hook(self._leave),
        ]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def now(self, phase: str | None, in_module: bool) -> str:
        """``optimizer``, ``backward``, ``recompute`` (a forward inside backward), ``forward``, ``no_grad`` or
        ``outside``; ``in_module`` says whether a module's forward runs on this thread."""
        if self._depth or phase == _OPTIMIZER_STEP:
            return "optimizer"
        if _graph_task() != -1:
            return "recompute" if in_module else "backward"
        if in_module:
            return "forward" if torch.is_grad_enabled() else "no_grad"
        return "outside"

    def _enter(self, *_: Any) -> None:
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth = max(0, self._depth - 1)  # recording may begin inside a step


# What a method that trains is called where phases are given by method; no phase itself.
TRAIN = "train"


class TrainingPhases:
    """While entered: the model's outermost forward, ``torch.autograd.backward`` and optimizers' steps are phases.

    Everything hooked is taken back at the end, by an exception too.

    Args:
        model: the model whose forward counts; None for none.
        enter: opens a phase and returns its mark.
        leave: closes it.
    """

    def __init__(self, model: Any, enter: Callable[[str], Any], leave: Callable[[Any], None]) -> None:
        self._model = model
        self._enter = enter
        self._leave = leave
        self._undo: list[Callable[[], None]] = []
        self._forward: list[Any] = []
        self._step: list[Any] = []

    def __enter__(self) -> TrainingPhases:
        from torch.optim import optimizer as hooks

        if hasattr(self._model, "register_forward_pre_hook"):
            before = self._model.register_forward_pre_hook(lambda *_: self._open(self._forward, Phase.FORWARD))
            after = self._model.register_forward_hook(lambda *_: self._close(self._forward), always_call=True)
            self._undo += [before.remove, after.remove]
        stepping = hooks.register_optimizer_step_pre_hook(lambda *_: self._open(self._step, Phase.OPTIMIZER_STEP))
        stepped = hooks.register_optimizer_step_post_hook(lambda *_: self._close(self._step))
        self._undo += [stepping.remove, stepped.remove]
        self._watch_backward()
        return self

    def __exit__(self, *exc: object) -> None:
        while self._undo:
            self._undo.pop()()
        for marks in (self._step, self._forward):
            while marks:
                self._leave(marks.pop())

    def _watch_backward(self) -> None:
        import torch

        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            mark = self._enter(Phase.BACKWARD.value)
            try:
                return original(*args, **kwargs)
            finally:
                self._leave(mark)

        def restore() -> None:
            if torch.autograd.backward is backward:
                torch.autograd.backward = original

        torch.autograd.backward = backward
        self._undo.append(restore)

    def _open(self, marks: list[Any], phase: Phase) -> None:
        # A forward run again by checkpointing belongs to the backward that runs it.
        import torch

        if phase is Phase.FORWARD and torch._C._current_graph_task_id() != -1:
            return
        marks.append(self._enter(phase.value))

    def _close(self, marks: list[Any]) -> None:
        if marks:
            self._leave(marks.pop())
