"""How TRL 0.14, the first release with GRPO, computed its log-probabilities: early published figures were made with it.

From ``GRPOTrainer.compute_loss`` of release 0.14.0: logits in full, in float32 because accelerate converts a model's
outputs; ``log_softmax`` row by row, all rows kept for backward; no attention mask; no temperature and no entropy. The
reference's pass came *after* the policy's, beside its whole graph. Later releases compute it before.
"""

from __future__ import annotations

import types
from typing import Any

import torch

__all__ = ["apply_trl_0_14", "log_softmax_rows"]


def apply_trl_0_14(trainer: Any) -> None:
    """Make a trainer of the installed TRL compute its log-probabilities in that way and order."""
    trainer._get_per_token_logps_and_entropies = types.MethodType(_logps_and_entropies, trainer)


def _logps_and_entropies(
    self: Any,
    model: Any,
    input_ids: Any,
    attention_mask: Any,
    logits_to_keep: int,
    batch_size: int | None = None,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
    **_: Any,
) -> tuple[Any, Any, Any]:
    if not torch.is_grad_enabled():  # the installed release asks for the reference here; 0.14 did so later
        return input_ids.new_zeros((len(input_ids), logits_to_keep), dtype=torch.float32), None, None
    logps = _logps(model, input_ids, logits_to_keep)
    if self.beta:
        with torch.no_grad():
            if self.ref_model is not None:
                _logps(self.ref_model, input_ids, logits_to_keep)
            else:
                with self.accelerator.unwrap_model(model).disable_adapter():
                    _logps(model, input_ids, logits_to_keep)
    return logps, torch.zeros_like(logps.detach()) if compute_entropy else None, None


def _logps(model: Any, input_ids: Any, keep: int) -> Any:
    logits = model(input_ids=input_ids, logits_to_keep=keep + 1).logits
    return log_softmax_rows(logits[:, :-1, :], input_ids[:, -keep:])


def log_softmax_rows(logits: Any, targets: Any) -> Any:
    """Log-probabilities ``[B, T]`` of targets from ``[B, T, V]`` logits, one row's ``log_softmax`` after the other."""
    rows = []
    for row, target in zip(logits, targets, strict=True):
        logp = row.log_softmax(dim=-1)
        rows.append(logp.gather(dim=-1, index=target.unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows)
