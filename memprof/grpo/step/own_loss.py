"""Distinguish the loss of a training step from a loss that is computed for another purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from memprof.errors import UsageError


class StepLoss:
    """The loss of one training step, followed from ``compute_loss`` to its backward.

    All pieces but the last have their backward inside ``compute_loss``, so ``.grad`` is right only if the returned loss
    gets one backward, after the step has computed it. Any other loss, such as one that a callback or a reward function
    asks for, is TRL's, in one graph.

    Attributes:
        is_computing: the step computes its loss at the moment.
    """

    def __init__(self) -> None:
        self.is_computing = False
        self._is_taken = False
        self._waits_for_backward = False

    @contextmanager
    def computing(self, context: AbstractContextManager[object]) -> Iterator[None]:
        """Enter ``context``, in which the step computes its loss."""
        with context:
            self.is_computing = True
            try:
                yield
            finally:
                self.is_computing = False

    def take(self) -> bool:
        """Return whether the loss that is asked for is the step's: the first while it computes."""
        is_own = self.is_computing and not self._is_taken
        self._is_taken = self._is_taken or is_own
        return is_own

    def follow(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss``, whose backward raises if it comes too early."""
        if loss.requires_grad:
            self._waits_for_backward = True
            loss.register_hook(self._note_backward)  # type: ignore[no-untyped-call]
        return loss

    def check_backward(self) -> None:
        """Raise a UsageError if the step had a backward that the loss took no part in."""
        if self._waits_for_backward:
            raise UsageError(f"An overridden compute_loss doesn't return the loss it computed first, {_IN_PIECES}")

    def _note_backward(self, _: torch.Tensor) -> None:
        if self.is_computing:
            raise UsageError(f"An overridden compute_loss differentiates the loss it computed first, {_IN_PIECES}")
        self._waits_for_backward = False


_IN_PIECES = (
    "but the lean trainer has already added most of that loss's gradient to .grad: compute the loss that you return "
    "first, or set micro_splitting=False."
)
