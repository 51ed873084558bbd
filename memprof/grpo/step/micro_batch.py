"""Run one micro-batch forward and backward in pieces, with the loss's normalisers kept those of the whole."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from memprof.compat import accelerate
from memprof.errors import UsageError
from memprof.grpo.loss.head import Scored
from memprof.grpo.loss.load_balancing import RoutedTokens
from memprof.grpo.micro_batch_inputs import MicroBatch
from memprof.grpo.rows import Place, Row, is_fake
from memprof.grpo.step.agreement import UsedGradient
from memprof.grpo.step.context import StepContext
from memprof.grpo.step.gradient_sums import gradient_sums
from memprof.grpo.step.objective import Gradient, Objective, Values
from memprof.grpo.step.out_of_memory import retry_on_oom
from memprof.grpo.step.pieces import Piece, plan
from memprof.grpo.step.random_state import RandomState
from memprof.grpo.step.schemes import RLOO, TOKEN, TWO_PASS, Scheme
from memprof.grpo.step.scoring import blank, close_prompt, score_piece, score_pieces, write

_SET_SYNC = accelerate.SET_SYNC_GRADIENTS.name


class PiecewiseStep:
    """One micro-batch's forward and backward, of ``model``, the policy as accelerate wrapped it.

    Where pieces go by less than the whole loss, the gradient they used is held against the whole's at the end: a loss
    that couples sequences (patched, or of a TRL to come) gets what is missing by a second pass, and two from then on.
    ``couples`` tells, after :meth:`run`, whether that was seen.

    Raises:
        UsageError: by :meth:`run`: such a loss, where no second pass is allowed or can be made.
    """

    def __init__(
        self,
        step: StepContext,
        objective: Objective,
        model: Any,
        inputs: MicroBatch,
        rows: Sequence[Row],
        scheme: Scheme,
    ) -> None:
        self._step, self._objective = step, objective
        self._model, self._inputs = model, inputs
        # DDP's wrapper broadcasts buffers in the first forward of a micro-batch: a rank that repeats it would wait.
        self._inner = model.module if self._distributed and step.adaptation is not None else model
        self._scheme, self._known_before = scheme.name, scheme.known_before
        silent = _silent(step, inputs) if scheme.name != TWO_PASS else set()
        without = [row for row in rows if row.index in silent]
        self._forward_only = plan(step, inputs, without) if without else []  # with a graph, should it be needed
        live = [row for row in rows if row.index not in silent]
        self._pieces = plan(step, inputs, live, balances=step.balancing is not None) or [Piece()]
        if self._distributed and (self._pieces[-1].prompt is not None or step.adaptation is not None):
            # Ranks meet in the wrapped model's backward, which a shared prompt does not go through, and which cannot be
            # repeated once it has begun: it is that of two tokens without a gradient.
            self._pieces.append(Piece())
        self._factors: list[float] = []
        self.couples = False
        self._logps, self._entropies = blank(inputs), blank(inputs)
        self._routed: RoutedTokens | None = None  # of all rows
        self._used = UsedGradient(inputs["completion_mask"])
        old = inputs.get("old_per_token_logps")
        if old is not None and scheme.name != TWO_PASS:
            # Rows not yet computed stand at ratio 1: any finite value would do.
            self._logps = old.float() * inputs["completion_mask"]
        elif step.loss.loss_type == RLOO:
            self._logps[:, 0] = inputs["old_logps"]  # of the sequence: its sum counts

    def run(self) -> torch.Tensor:
        """Run all pieces; return the loss's value with the graph of what is left to be differentiated."""
        if self._scheme == TWO_PASS:
            states = self._score(self._pieces)
            loss, gradient = self._whole_gradient()
            last = self._all_but_last(gradient, states)
        else:
            silent = self._score(self._forward_only)
            states = []
            before = self._objective.gradient(self._values) if self._known_before else None
            last = self._all_but_last(before, states)
            loss, whole = self._objective.loss_and_gradient(self._values, self._scale)
            if not is_fake(self._logps) and self._step.ranks.any(not self._used.agrees(whole)):
                last = self._with_the_rest(last, whole, silent + states)
        return last - last.detach() + loss.detach()

    @property
    def _values(self) -> Values:
        """Return the log-probabilities and entropies computed so far."""
        balancing, balance = self._step.balancing, None
        if balancing is not None:
            balance = torch.zeros((), device=self._logps.device)
            if self._routed is not None:
                balance = balancing.share(self._routed, self._routed).detach().to(balance.device)
        return Values(self._logps, self._entropies, balance)

    def _all_but_last(self, gradient: Gradient | None, states: list[RandomState]) -> torch.Tensor:
        """Run every piece forward and all but the last backward; return the last's surrogate.

        Unless ranks meet in it, or the loss may be scaled later, the last has its backward here too, and a scalar
        without a graph is returned: a run that goes on after memory has run out and one that raises then have the same
        peak. ``states``: the random state before each piece, restored where given.
        """
        repeats, step = bool(states), self._step
        wanted, sharded = step.settings.gradient_sums, step.ranks.forward_together
        with gradient_sums(wanted, step.policy, len(self._pieces), sharded=sharded, log=step.log) as sums:
            for number, piece in enumerate(self._pieces[:-1]):
                self._set_or_note_random_state(states, number, repeats)
                with self._unsynchronised():
                    self._forward_and_backward(piece, gradient, sums)
        self._set_or_note_random_state(states, len(self._pieces) - 1, repeats)
        if self._distributed or sharded or step.loss.may_be_scaled_later:
            return self._watched(self._surrogate(self._pieces[-1], gradient))
        with self._unsynchronised():  # the backward that ends the step is that of the scalar
            self._forward_and_backward(self._pieces[-1], gradient, {})
        return self._watched(torch.zeros((), device=self._logps.device, requires_grad=True))

    def _forward_and_backward(
        self, piece: Piece, gradient: Gradient | None, sums: Mapping[torch.Tensor, torch.Tensor]
    ) -> None:
        def run(piece: Piece) -> None:
            surrogate = self._watched(self._surrogate(piece, gradient))
            if surrogate.requires_grad:  # not where all parameters had their part before memory ran out
                self._backward(surrogate)

        adaptation = self._step.adaptation
        if adaptation is None:
            self._backward(self._watched(self._surrogate(piece, gradient)))
        else:
            retry_on_oom(piece, run, self._trained, sums, adaptation, self._logps.device, splits=self._may_split)

    @functools.cached_property
    def _trained(self) -> list[torch.Tensor]:
        return [parameter for parameter in self._step.policy.parameters() if parameter.requires_grad]

    def _may_split(self) -> bool:
        """Tell whether halves of a piece have its gradient: not where the router's loss was counted over it alone."""
        counted = self._step.balancing is None or self._scheme == TWO_PASS
        return counted and not self._step.draws

    def _set_or_note_random_state(self, states: list[RandomState], number: int, repeats: bool) -> None:
        if repeats:
            states[number].restore()
        else:
            states.append(RandomState.now(self._logps.device))

    def _with_the_rest(self, last: torch.Tensor, whole: Gradient, states: list[RandomState]) -> torch.Tensor:
        """Run every piece once more, with the part of the ``whole`` loss's gradient that it has not used; return the
        last piece's surrogate, in place of ``last``. ``states``: the random state before each piece."""
        apart = f"{100 * self._used.distance(whole):.2g}% of its norm"
        found = f"the loss couples sequences: the gradient taken by sequence is {apart} from that of the micro-batch"
        if self._step.settings.exact_two_pass == "never":
            raise UsageError(f"The lean trainer: {found}. Set exact_two_pass='auto'.")
        if _is_deepspeed(self._step.accelerator):
            raise UsageError(f"The lean trainer: {found}. Set exact_two_pass='always'.")
        self._step.log.warn(f"{found}. A second pass corrects it, and later steps use two passes")
        self.couples = True
        self._backward(last)
        del last
        self._pieces = [*self._forward_only, *self._pieces]
        return self._all_but_last(self._used.rest(whole), states)

    @property
    def _distributed(self) -> bool:
        return isinstance(self._model, torch.nn.parallel.DistributedDataParallel)

    def _score(self, pieces: Sequence[Piece]) -> list[RandomState]:
        """Fill in the pieces' values; return the random state before each, to repeat its dropout."""
        states = []
        for piece in pieces:
            states.append(RandomState.now(self._logps.device))
            routed = score_pieces(
                self._step, self._inner, self._inputs, [piece], self._logps, self._entropies, balances=True
            )
            self._routed = self._routed if routed is None else routed.plus(self._routed)
        return states

    @property
    def _scale(self) -> float:
        """Return what :meth:`_backward` multiplies a loss by: fp16's scale over the accumulated micro-batches."""
        scaler = self._step.accelerator.scaler
        return (1.0 if scaler is None else float(scaler.get_scale())) / self._step.loss.divisor

    def _whole_gradient(self) -> tuple[torch.Tensor, Gradient]:
        """Compute the loss and its gradient with respect to every row's values.

        The part of a loss that is not TRL's which reaches the parameters by another way (a penalty on weights, a
        forward of its own) has its backward here.
        """
        if self._step.loss.is_trls:
            return self._objective.loss_and_gradient(self._values, self._scale)
        with self._unsynchronised():
            return self._objective.loss_and_all_gradients(self._values, self._backward, self._scale)

    def _watched(self, surrogate: torch.Tensor) -> torch.Tensor:
        """Refuse, in the last backward, a factor of an overridden ``compute_loss`` that earlier pieces did not have.

        All pieces but the last have had their backward when an override gets the loss: a factor comes too late.
        """
        if not self._step.loss.may_be_scaled_later or not surrogate.requires_grad or is_fake(surrogate):
            return surrogate

        def check(arriving: torch.Tensor) -> None:
            self._factors.append(float(arriving))
            if not math.isclose(self._factors[0], self._factors[-1], rel_tol=1e-3):
                raise UsageError(
                    "An overridden compute_loss (or training_step) changes the loss by a factor, but all "
                    "chunks of the micro-batch but the last have run their backward: override _compute_loss "
                    "instead, or set micro_splitting=False."
                )

        surrogate.register_hook(check)  # type: ignore[no-untyped-call]
        return surrogate

    def _surrogate(self, piece: Piece, gradient: Gradient | None) -> torch.Tensor:
        """Return a scalar whose gradient is the piece's share of the loss's."""
        if piece.closes:
            return close_prompt(self._step, self._inner, self._inputs, piece).to(self._logps.device)
        if not piece.rows:
            scored = score_piece(self._step, self._model, self._inputs, piece)
            return scored.logps[0].sum() * 0.0
        if self._scheme == TOKEN if gradient is None else not self._step.scales_gradients:
            return self._anchored(piece, gradient)
        scored = score_piece(self._step, self._inner, self._inputs, piece, balances=True)
        self._note_routed(scored)
        if gradient is None:
            write(scored, self._logps, self._entropies)
            gradient = self._objective.gradient(self._values)
        for row in piece.rows:
            self._used.note((row.index, slice(0, row.completion)), gradient)
        return self._balanced(_weighted(scored, gradient), scored, gradient)

    def _anchored(self, piece: Piece, gradient: Gradient | None) -> torch.Tensor:
        """Return the anchor of a piece whose gradient is known, or (None) found token by token in its forward."""

        def of(
            place: Place, logps: torch.Tensor, entropies: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            self._logps[place] = logps.to(self._logps.device)
            if entropies is not None:
                self._entropies[place] = entropies.to(self._logps.device)
            found = self._objective.gradient(self._values) if gradient is None else gradient
            return self._used.note(place, found, logps.device)

        scored = score_piece(self._step, self._inner, self._inputs, piece, token_gradient=of, balances=True)
        self._note_routed(scored)
        assert scored.anchor is not None
        return self._balanced(scored.anchor, scored, gradient)

    def _note_routed(self, scored: Scored) -> None:
        """Remember what the router did, where the piece is the only one; else a first pass has counted all."""
        if self._routed is None and scored.routed is not None:
            self._routed = scored.routed._replace(probabilities=scored.routed.probabilities.detach())

    def _balanced(self, surrogate: torch.Tensor, scored: Scored, gradient: Gradient | None) -> torch.Tensor:
        """Add the piece's share of the router's auxiliary loss, in the measure that the loss has of it."""
        balancing = self._step.balancing
        if balancing is None or scored.routed is None or self._routed is None:
            return surrogate
        weight = (self._objective.gradient(self._values) if gradient is None else gradient).balance
        if weight is None:
            return surrogate
        share = balancing.share(scored.routed, self._routed).to(surrogate.device)
        return surrogate + weight.to(surrogate.device) * share

    def _backward(self, surrogate: torch.Tensor) -> None:
        accelerator = self._step.accelerator
        options = {"scale_wrt_gas": False} if _is_deepspeed(accelerator) else {}
        divisor = self._step.loss.divisor
        accelerator.backward(surrogate / divisor if divisor > 1 else surrogate, **options)

    @contextmanager
    def _unsynchronised(self) -> Iterator[None]:
        """Keep gradients here until the last piece; FSDP and DeepSpeed shard each piece's, which keeps them small."""
        state = self._step.accelerator.gradient_state
        synchronise = getattr(state, _SET_SYNC)
        kept = state.sync_gradients
        synchronise(False)
        try:
            if self._distributed:
                with self._model.no_sync():
                    yield
            else:
                yield
        finally:
            synchronise(kept)


def _weighted(scored: Scored, gradient: Gradient) -> torch.Tensor:
    terms = []
    for row, logps, entropies in zip(scored.rows, scored.logps, scored.entropies, strict=True):
        part = (row.index, slice(0, row.completion))
        terms.append((logps * gradient.logps[part]).sum())
        if gradient.entropies is not None and entropies is not None:
            terms.append((entropies * gradient.entropies[part]).sum())
    return torch.stack(terms).sum()


def _silent(step: StepContext, inputs: MicroBatch) -> set[int]:
    """Find rows whose gradient is exactly zero: their advantage is 0 (a group of equal rewards), and no other term of
    the loss has a gradient. They need a forward for the metrics and no backward."""
    advantages = inputs["advantages"]
    others = step.loss.beta != 0.0 or step.loss.entropy_bonus or step.loss.balances
    together = step.ranks.forward_together
    if others or together or is_fake(advantages):
        return set()
    found = (advantages.reshape(advantages.shape[0], -1) == 0).all(1).tolist()
    return {index for index, silent in enumerate(found) if silent}


def _is_deepspeed(accelerator: Any) -> bool:
    return str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type)).upper() == "DEEPSPEED"
