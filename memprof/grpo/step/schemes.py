"""Choose, for each micro-batch, how much of the loss must be known before a piece's gradient is.

- ``token``: a token's gradient needs nothing but that token. The head's gradient is computed in its forward.
- ``sequence``: it needs its sequence (sequence-level ratios, VESPO's weights, masks by sequence).
- ``two_pass``: it needs the whole micro-batch. A first forward without a graph finds the log-probabilities and
  entropies, the loss's gradient follows from those, and a second forward carries it back.

All three give the gradient of TRL's own loss; they differ in products and passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memprof.compat import trl
from memprof.grpo.micro_batch_inputs import MicroBatch

if TYPE_CHECKING:
    from memprof.grpo.config import LeanGRPOConfig

TOKEN, SEQUENCE, TWO_PASS = "token", "sequence", "two_pass"
#: The ``loss_type`` of ``RLOOTrainer``, which has no such setting.
RLOO = "rloo"

# Losses whose gradient with respect to a token is a function of that token's ratio.
_BY_TOKEN = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo")
_BY_SEQUENCE = (*_BY_TOKEN, "vespo", RLOO)


@dataclass(frozen=True)
class LossTerms:
    """What a trainer's loss is made of at this step; settings as in ``GRPOConfig``.

    ``is_trls``: the loss is TRL's function of TRL's log-probabilities, which no subclass has replaced.
    ``may_be_scaled_later``: who calls ``compute_loss`` may multiply what it returns. ``entropy_bonus``: entropies have
    a term of their own. ``balances``: the router has an auxiliary loss. ``couples``: pieces were seen to give another
    gradient than the whole micro-batch. ``divisor``: what transformers divides the returned loss by before its backward
    (accumulated micro-batches), and so what the backward of an earlier piece is divided by.
    """

    is_trls: bool
    may_be_scaled_later: bool
    # Those of RLOOTrainer's loss; its KL is a part of the rewards.
    loss_type: str = RLOO
    beta: float = 0.0
    importance_sampling_level: str = "sequence"
    top_entropy_quantile: float = 1.0
    off_policy_mask_threshold: float | None = None
    entropy_bonus: bool = False
    couples: bool = False
    balances: bool = False
    divisor: int = 1

    @classmethod
    def of(cls, trainer: Any, *, is_wrapped: bool, **known: Any) -> LossTerms:
        """Read the terms off a ``GRPOTrainer``. ``is_wrapped``: a subclass replaces its ``compute_loss``."""
        return cls(
            may_be_scaled_later=is_wrapped,
            loss_type=trl.LOSS_TYPE.of(trainer),
            beta=trl.BETA.of(trainer),
            importance_sampling_level=trl.IMPORTANCE_LEVEL.of(trainer),
            top_entropy_quantile=trl.ENTROPY_QUANTILE.of(trainer),
            off_policy_mask_threshold=trl.OFF_POLICY_MASK.of(trainer),
            entropy_bonus=trl.ENTROPY_BONUS.of(trainer),
            **known,
        )


@dataclass(frozen=True)
class Scheme:
    """The scheme's name and why it is the one. ``known_before``: the gradient is known before log-probabilities are."""

    name: str
    why: str
    known_before: bool = False


def scheme_of(
    loss: LossTerms, settings: LeanGRPOConfig, inputs: MicroBatch, *, scales: bool, one_piece: bool = False
) -> Scheme:
    """Choose the cheapest scheme that is exact for a loss on TRL's micro-batch ``inputs``.

    ``scales``: gradients are scaled (fp16). ``one_piece``: all rows go through the model together, on every rank.
    """
    if settings.exact_two_pass == "always":
        return Scheme(TWO_PASS, "exact_two_pass='always'")
    if not loss.is_trls:  # a subclass's may do anything, which two passes are exact for
        return Scheme(TWO_PASS, "_compute_loss or _get_per_token_logps_and_entropies is overridden")
    if loss.couples:
        return Scheme(TWO_PASS, "the loss couples sequences")
    if loss.loss_type not in _BY_SEQUENCE:
        return Scheme(TWO_PASS, f"loss_type={loss.loss_type!r} is not known to separate")
    if loss.top_entropy_quantile < 1.0:
        return Scheme(TWO_PASS, "top_entropy_quantile compares the tokens of all sequences")
    if loss.balances and not one_piece:
        return Scheme(TWO_PASS, "the router's auxiliary loss counts the tokens of all sequences")
    why = _needs_sequence(loss, settings, inputs, scales)
    if why:
        return Scheme(SEQUENCE, why)
    constant = inputs.get("old_per_token_logps") is None and loss.beta == 0.0  # the ratio is 1, and there is no KL
    return Scheme(TOKEN, f"loss_type={loss.loss_type!r} separates by token", known_before=constant)


def _needs_sequence(loss: LossTerms, settings: LeanGRPOConfig, inputs: MicroBatch, scales: bool) -> str | None:
    if scales:
        return "fp16 gradients are scaled, which a gradient computed in the forward cannot be in time"
    if loss.loss_type == RLOO:
        return "RLOO's ratio is that of a whole sequence"
    if loss.off_policy_mask_threshold is not None:
        return "off_policy_mask_threshold masks whole sequences"
    if inputs.get("old_per_token_logps") is None:
        # The ratio is 1 whatever the log-probabilities are, and its gradient is known.
        corrected = loss.beta != 0.0 and settings.use_bias_correction_kl
        if corrected and loss.importance_sampling_level == "sequence":
            return "use_bias_correction_kl multiplies a token's KL by its sequence's ratio"
        return None
    if loss.loss_type == "vespo":
        return "vespo's weights are those of whole sequences"
    if loss.importance_sampling_level != "token":
        return "importance_sampling_level='sequence'"
    return None
