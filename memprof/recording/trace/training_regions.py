"""Tell in which part of a step a tensor is made: forward, backward, recomputation, optimizer step or none.

For recorders that see each tensor being made (the tensor trace, the simulator). They ask on the thread that makes it.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.compat import torch as torch_names
from memprof.recording.guard import NULL_GUARD, FailureGuard
from memprof.vocabulary import Phase

_graph_task: Any = torch_names.GRAPH_TASK.get()
_OPTIMIZER_STEP = Phase.OPTIMIZER_STEP.value


class Region:
    """Tell whether an optimizer is stepping, by hooks between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self._depth = 0
        self._handles: list[Any] = []

    def start(self, guard: FailureGuard = NULL_GUARD) -> None:
        """Hook into optimizers' steps."""
        self._handles = [
            torch_names.BEFORE_STEP.get()(guard.hook(self._enter)),
            torch_names.AFTER_STEP.get()(guard.hook(self._leave)),
        ]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def now(self, phase: str | None, in_module: bool) -> str:
        """Return ``optimizer``, ``backward``, ``recompute`` (a forward inside a backward), ``forward``, ``no_grad`` or
        ``outside``; ``in_module``: a module's forward runs on this thread."""
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
