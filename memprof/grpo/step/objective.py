"""TRL's own loss as a function of a micro-batch's per-token log-probabilities and entropies.

``GRPOTrainer._compute_loss`` asks the trainer for the log-probabilities and turns them into a loss, metrics and
collectives. Handing it given ones makes the formula of every loss type available without a copy of any: with leaf
tensors its gradient is that of the loss with respect to each token's log-probability.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Gradient", "Objective"]

Gradient = tuple[torch.Tensor, "torch.Tensor | None"]

# What `_compute_loss` keeps on the trainer besides metrics.
_STATE = ("_entropy_window_stats", "_last_world_entropy", "entropy_coef")


class Objective:
    """The loss of ``inputs`` (TRL's micro-batch), whatever ``loss_type`` the trainer has.

    Args:
        trainer: a :class:`~memprof.grpo.LeanGRPOTrainer`.
        model: passed on to ``_compute_loss``; never called.
    """

    def __init__(self, trainer: Any, model: Any, inputs: Mapping[str, Any]) -> None:
        self._trainer, self._model, self._inputs = trainer, model, inputs

    def loss(self, logps: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        """The loss, with metrics logged and collectives run as TRL does: call it once for each micro-batch.

        ``logps`` and ``entropies`` are ``[B, T]`` fp32, 0 where ``completion_mask`` is.
        """
        with self._given(logps, entropies):
            loss: torch.Tensor = self._trainer._compute_loss(self._model, self._inputs)
        return loss

    def loss_and_gradient(self, logps: torch.Tensor, entropies: torch.Tensor) -> tuple[torch.Tensor, Gradient]:
        """:meth:`loss` and its gradient with respect to ``logps`` and ``entropies`` (None where it needs none)."""
        leaves = (logps.detach().requires_grad_(), entropies.detach().requires_grad_())
        with torch.enable_grad():
            loss = self.loss(*leaves)
            return loss.detach(), _gradient(loss, leaves)

    def loss_and_all_gradients(
        self, logps: torch.Tensor, entropies: torch.Tensor, backward: Callable[[torch.Tensor], None], scale: float
    ) -> tuple[torch.Tensor, Gradient]:
        """:meth:`loss_and_gradient` for a loss that may also depend on the parameters by ways of its own.

        Those parts of the gradient go where ``backward(loss)`` puts them, the parameters' ``.grad``. ``scale`` is what
        ``backward`` multiplies the loss by (fp16): what is returned is without it.
        """
        leaves = (logps.detach().requires_grad_(), entropies.detach().requires_grad_())
        with torch.enable_grad():
            loss = self.loss(*leaves)
        if loss.requires_grad:
            backward(loss)
        found = [None if leaf.grad is None else leaf.grad / scale for leaf in leaves]
        return loss.detach(), (torch.zeros_like(logps) if found[0] is None else found[0], found[1])

    def gradient(self, logps: torch.Tensor, entropies: torch.Tensor) -> Gradient:
        """The gradient alone: nothing is logged, no other rank is asked, and nothing waits for the device.

        Any number of calls, also with values that are right in some rows only: where the loss separates, a row's
        gradient does not depend on the others'.
        """
        leaves = (logps.detach().requires_grad_(), entropies.detach().requires_grad_())
        with torch.enable_grad(), self._muted(), self._given(*leaves):
            return _gradient(self._trainer._compute_loss(self._model, self._inputs), leaves)

    @contextmanager
    def _given(self, logps: torch.Tensor, entropies: torch.Tensor) -> Iterator[None]:
        self._trainer._given_logps = (logps, entropies, None)
        try:
            yield
        finally:
            self._trainer._given_logps = None

    @contextmanager
    def _muted(self) -> Iterator[None]:
        trainer = self._trainer
        kept = {name: getattr(trainer, name) for name in _STATE if hasattr(trainer, name)}
        kept |= {"accelerator": trainer.accelerator, "_metrics": trainer._metrics}
        trainer.accelerator = _Alone(trainer.accelerator)
        trainer._metrics = defaultdict(lambda: defaultdict(list))
        try:
            yield
        finally:
            for name, value in kept.items():
                setattr(trainer, name, value)


def _gradient(loss: torch.Tensor, leaves: tuple[torch.Tensor, torch.Tensor]) -> Gradient:
    if not loss.requires_grad:  # nothing in it depends on the policy, as when every advantage is masked
        return torch.zeros_like(leaves[0]), None
    logps, entropies = torch.autograd.grad(loss, leaves, allow_unused=True)
    return torch.zeros_like(leaves[0]) if logps is None else logps, entropies


class _Alone:
    """An accelerator whose collectives see this process only, and give metrics nothing to wait for."""

    sync_gradients = False

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    gather_for_metrics = gather

    def reduce(self, tensor: torch.Tensor, reduction: str = "sum", scale: float = 1.0) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
