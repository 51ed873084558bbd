"""Compute log-probabilities from whole logits, as TRL did up to its 0.2x releases."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["log_softmax_rows", "logps_from_full_logits", "selected_logprobs"]

_ENTROPY_ROWS = 128


def logps_from_full_logits(
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
    """Compute log-probabilities from ``[batch, tokens, vocabulary]`` logits, in the place of TRL's own method."""
    batch_size = batch_size or input_ids.size(0)
    logps, entropies = [], []
    for start in range(0, input_ids.size(0), batch_size):
        ids = input_ids[start : start + batch_size]
        mask = attention_mask[start : start + batch_size]
        logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=logits_to_keep + 1).logits
        logits = logits[:, :-1, :]
        logits = logits[:, -logits_to_keep:]
        logits = logits / self.temperature
        logps.append(selected_logprobs(logits, ids[:, -logits_to_keep:]))
        if compute_entropy:
            with torch.no_grad():
                entropies.append(_entropy(logits))
    return torch.cat(logps, dim=0), torch.cat(entropies, dim=0) if compute_entropy else None, None


def selected_logprobs(logits: Any, targets: Any) -> Any:
    """Compute log-probabilities ``[B, T]`` of the targets from ``[B, T, V]`` logits, as TRL's 0.2x releases did.

    Row by row, so that one row's temporaries exist at a time.
    """
    if logits.dtype in (torch.float32, torch.float64):
        chosen = torch.gather(logits, dim=-1, index=targets.unsqueeze(-1)).squeeze(-1)
        return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    return log_softmax_rows(logits, targets)


def _entropy(logits: Any) -> Any:
    flat = logits.reshape(-1, logits.shape[-1])
    parts = []
    for chunk in flat.split(_ENTROPY_ROWS):
        logp = torch.log_softmax(chunk, dim=-1)
        parts.append(-(torch.exp(logp) * logp).sum(-1))
    return torch.cat(parts).reshape(logits.shape[:-1])


def log_softmax_rows(logits: Any, targets: Any) -> Any:
    """Compute log-probabilities ``[B, T]`` of targets from ``[B, T, V]`` logits, row by row with ``log_softmax``."""
    rows = []
    for row, target in zip(logits, targets, strict=True):
        logp = row.log_softmax(dim=-1)
        rows.append(logp.gather(dim=-1, index=target.unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows)
