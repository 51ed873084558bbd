"""How much of a loss has to be known before a piece's gradient is: chosen by name, for each micro-batch.

- ``token``: a token's gradient needs nothing but that token. The head's gradient is computed in its forward.
- ``sequence``: it needs its sequence (sequence-level ratios, VESPO's weights, masks by sequence).
- ``two_pass``: it needs the whole micro-batch. A first forward without a graph finds the log-probabilities and
  entropies, the loss's gradient follows from those, and a second forward carries it back.

All three give the gradient of TRL's own loss; they differ in products and passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["SEQUENCE", "TOKEN", "TWO_PASS", "Scheme", "scheme_of"]

TOKEN, SEQUENCE, TWO_PASS = "token", "sequence", "two_pass"

# Losses whose gradient with respect to a token is a function of that token's ratio.
_BY_TOKEN = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo")
_BY_SEQUENCE = (*_BY_TOKEN, "vespo")


@dataclass(frozen=True)
class Scheme:
    """The scheme's name and why it is the one."""

    name: str
    why: str


def scheme_of(trainer: Any, inputs: Mapping[str, Any], known_loss: bool) -> Scheme:
    """The cheapest scheme that is exact for ``trainer``'s loss on ``inputs``.

    Args:
        known_loss: the loss is TRL's own. A subclass's may do anything, which two passes are exact for.
    """
    args = trainer.args
    if args.exact_two_pass == "always":
        return Scheme(TWO_PASS, "exact_two_pass='always'")
    if not known_loss:
        return Scheme(TWO_PASS, "_compute_loss or _get_per_token_logps_and_entropies is overridden")
    if trainer.loss_type not in _BY_SEQUENCE:
        return Scheme(TWO_PASS, f"loss_type={trainer.loss_type!r} is not known to separate")
    if trainer.top_entropy_quantile < 1.0:
        return Scheme(TWO_PASS, "top_entropy_quantile compares the tokens of all sequences")
    why = _needs_sequence(trainer, inputs)
    return Scheme(SEQUENCE, why) if why else Scheme(TOKEN, f"loss_type={trainer.loss_type!r} separates by token")


def _needs_sequence(trainer: Any, inputs: Mapping[str, Any]) -> str | None:
    if not trainer.args.fused_loss:
        return "fused_loss is off"
    if trainer.accelerator.scaler is not None:
        return "fp16 gradients are scaled, which a gradient computed in the forward cannot be in time"
    if trainer.off_policy_mask_threshold is not None:
        return "off_policy_mask_threshold masks whole sequences"
    if inputs.get("old_per_token_logps") is None:
        # The ratio is 1 whatever the log-probabilities are, and its gradient is known.
        corrected = trainer.beta != 0.0 and trainer.args.use_bias_correction_kl
        if corrected and trainer.importance_sampling_level == "sequence":
            return "use_bias_correction_kl multiplies a token's KL by its sequence's ratio"
        return None
    if trainer.loss_type == "vespo":
        return "vespo's weights are those of whole sequences"
    if trainer.importance_sampling_level != "token":
        return "importance_sampling_level='sequence'"
    return None
