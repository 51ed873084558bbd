"""Ask TRL's own loss for its value and gradient, as a function of log-probabilities, entropies and auxiliary loss.

``GRPOTrainer._compute_loss`` asks the trainer for the log-probabilities and turns them into a loss, metrics and
collectives. Handing it given ones makes the formula of every loss type available without a copy of any: with leaf
tensors its gradient is that of the loss with respect to each token's log-probability. A loss that does not use what it
was handed would train nothing and look plausible: it is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from memprof.compat import trl
from memprof.compat.versions import EXECUTING, installed
from memprof.errors import UsageError
from memprof.grpo.micro_batch_inputs import MicroBatch
from memprof.grpo.support import is_librarys


class Values(NamedTuple):
    """What TRL's loss asks for: ``logps`` and ``entropies`` ``[B, T]`` fp32, 0 where ``completion_mask`` is;
    ``balance``: the router's auxiliary loss, a scalar, or None."""

    logps: torch.Tensor
    entropies: torch.Tensor
    balance: torch.Tensor | None = None

    def leaves(self) -> Values:
        """Return the same values as leaves of a graph."""
        balance = None if self.balance is None else self.balance.detach().requires_grad_()
        return Values(self.logps.detach().requires_grad_(), self.entropies.detach().requires_grad_(), balance)


class Gradient(NamedTuple):
    """The loss's gradient with respect to each of :class:`Values`; None where it needs none."""

    logps: torch.Tensor
    entropies: torch.Tensor | None = None
    balance: torch.Tensor | None = None


# What `_compute_loss` keeps on the trainer besides metrics.
_STATE = tuple(target.name for target in (trl.ENTROPY_WINDOW, trl.LAST_ENTROPY, trl.ENTROPY_COEFFICIENT))
_METRICS = trl.METRICS.name


class LogprobInjection:
    """Values on their way to TRL's loss, which takes them in place of its own forward."""

    def __init__(self) -> None:
        self._given: Values | None = None
        self.was_taken = False  #: Whether the loss computed last asked for what it was handed.
        self._asked_for: Callable[..., bool] | None = None

    @contextmanager
    def of(self, values: Values, asked_for: Callable[..., bool] | None = None) -> Iterator[None]:
        """Hand ``values`` to the loss that is computed inside, where it asks for these: ``asked_for(*asked)``."""
        self._given, self.was_taken, self._asked_for = values, False, asked_for
        try:
            yield
        finally:
            self._given = None

    def take(self, *asked: Any) -> Values | None:
        """Return what the trainer's log-probabilities of ``asked`` (a model, ids and mask ``[B, P + T]``) are to be, or
        None outside of a handover and for others."""
        if self._given is None or (self._asked_for is not None and not self._asked_for(*asked)):
            return None
        if self._given.logps.requires_grad and not torch.is_grad_enabled():
            # Asked for as constants, such as a policy's of before: the loss has not used the graph by that.
            return Values(*(None if value is None else value.detach() for value in self._given))  # type: ignore[arg-type]
        self.was_taken = True
        return self._given


class Objective:
    """The loss of ``inputs`` (TRL's micro-batch), whatever ``loss_type`` the trainer has, whose log-probabilities are
    what ``handover`` gives.

    ``is_trls``: the loss is TRL's own, so that it must use what it is handed; another may get its gradient elsewhere.

    Raises:
        UsageError: by every method: the loss did not use the log-probabilities it was handed.
    """

    def __init__(
        self,
        trainer: Any,
        handover: LogprobInjection,
        model: Any,
        inputs: MicroBatch,
        *,
        is_trls: bool,
    ) -> None:
        self._trainer, self._handover, self._is_trls = trainer, handover, is_trls
        self._model, self._inputs = model, inputs
        self._compute = getattr(trainer, trl.LOSS.name)

    def loss(self, values: Values) -> torch.Tensor:
        """Compute the loss, log its metrics and run its collectives as TRL does: once for each micro-batch."""
        asks_for_these = self._is_trls and is_librarys(self._compute)  # nor is it patched: nothing need be compared
        with self._handover.of(values, None if asks_for_these else self._is_of_these):
            loss: torch.Tensor = self._compute(self._model, self._inputs)
        if self._is_trls and not self._handover.was_taken:
            raise UsageError(self._unused("did not ask for them"))
        return loss

    def _is_of_these(self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> bool:
        """Tell whether another loss than TRL's asks for the policy's log-probabilities of these ``inputs``."""
        unwrap = self._trainer.accelerator.unwrap_model
        own = self._inputs
        return (
            unwrap(model) is unwrap(self._model)
            and torch.equal(torch.cat([own["prompt_ids"], own["completion_ids"]], 1), input_ids)
            and torch.equal(torch.cat([own["prompt_mask"], own["completion_mask"]], 1), attention_mask)
        )

    def loss_and_gradient(self, values: Values, scale: float = 1.0) -> tuple[torch.Tensor, Gradient]:
        """Compute :meth:`loss` and its gradient with respect to ``values``.

        TRL's loss depends on the parameters by these alone. One that is patched may by other ways too: those parts of
        the gradient, times ``scale``, are added to the parameters' ``.grad``.
        """
        leaves = values.leaves()
        with torch.enable_grad():
            loss = self.loss(leaves)
            others = _leaves_behind(loss, leaves)
            gradients = torch.autograd.grad(loss, others, retain_graph=True) if others else ()
            for leaf, gradient in zip(others, gradients, strict=True):
                more = gradient if scale == 1.0 else gradient * scale
                leaf.grad = more if leaf.grad is None else leaf.grad + more
            return loss.detach(), self._gradient(loss, leaves)

    def loss_and_all_gradients(
        self, values: Values, backward: Callable[[torch.Tensor], None], scale: float
    ) -> tuple[torch.Tensor, Gradient]:
        """Return the same as :meth:`loss_and_gradient`, of a loss that may reach the parameters by its own ways too.

        Those parts of the gradient go where ``backward(loss)`` puts them, the parameters' ``.grad``. ``scale`` is what
        ``backward`` multiplies the loss by: what is returned is without it.
        """
        leaves = values.leaves()
        with torch.enable_grad():
            loss = self.loss(leaves)
        if not loss.requires_grad:
            raise UsageError(self._unused("gave a loss without a gradient"))
        backward(loss)
        found = [None if leaf is None or leaf.grad is None else leaf.grad / scale for leaf in leaves]
        logps = torch.zeros_like(values.logps) if found[0] is None else found[0]
        return loss.detach(), Gradient(logps, *found[1:])

    def gradient(self, values: Values) -> Gradient:
        """Compute the gradient alone: nothing is logged, no other rank is asked, and nothing waits for the device.

        ``values`` may be right in some rows only: where the loss separates, a row's gradient does not depend on the
        others'.
        """
        leaves = values.leaves()
        with torch.enable_grad(), self._muted():
            return self._gradient(self.loss(leaves), leaves)

    def _gradient(self, loss: torch.Tensor, leaves: Values) -> Gradient:
        given = [leaf for leaf in leaves if leaf is not None]
        found = torch.autograd.grad(loss, given, allow_unused=True) if loss.requires_grad else (None, None)
        if found[0] is None:
            raise UsageError(self._unused("gave a loss that does not depend on them"))
        return Gradient(*found)

    def _unused(self, what: str) -> str:
        theirs = next(base for base in type(self._trainer).__mro__ if base.__module__.startswith("trl."))
        kind = theirs.__name__ if self._is_trls else type(self._trainer).__name__
        handed = f"{kind}.{trl.LOSS.name} was handed the step's log-probabilities"
        happened = f"{handed} and {what}, so nothing would be trained"
        if not self._is_trls:
            return f"The lean trainer: {happened}: set micro_splitting=False."
        tested, found = EXECUTING["trl"], installed("trl")
        return f"The lean trainer was tested with TRL {tested}; in TRL {found}, {happened}: use trl.{kind}."

    @contextmanager
    def _muted(self) -> Iterator[None]:
        """Keep the trainer's state, metrics and collectives out of a loss that is computed for its gradient only."""
        trainer = self._trainer
        kept = {name: getattr(trainer, name) for name in _STATE if hasattr(trainer, name)}
        kept |= {"accelerator": trainer.accelerator, _METRICS: getattr(trainer, _METRICS)}
        trainer.accelerator = _Alone(trainer.accelerator)
        setattr(trainer, _METRICS, defaultdict(lambda: defaultdict(list)))
        try:
            yield
        finally:
            for name, value in kept.items():
                setattr(trainer, name, value)


def _leaves_behind(loss: torch.Tensor, known: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """Find the leaves that ``loss`` has a graph to, but for those that are ``known``."""
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    found: list[torch.Tensor] = []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and not any(leaf is other for other in known):
            found.append(leaf)
        waiting += [behind for behind, _ in node.next_functions]
    return found


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
