"""In which part of a step a tensor is made: a forward, a backward, a recomputation, an optimizer's step, none of them.

For recorders that see tensors being made (the tensor trace, the simulator); stays on the thread that makes them.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.vocabulary import Phase

__all__ = ["Region"]

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
