"""Describe the micro-batch that TRL hands to its loss."""

from __future__ import annotations

from typing import TypedDict

import torch


class _Always(TypedDict):
    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    completion_ids: torch.Tensor
    completion_mask: torch.Tensor


class MicroBatch(_Always, total=False):
    """The entries that the lean step reads; ``B`` rows, ``P`` prompt and ``T`` completion tokens, padding included.

    Attributes:
        prompt_ids: token ids, int64 ``[B, P]``, padded on the left.
        prompt_mask: 1 for real tokens, ``[B, P]``.
        completion_ids: token ids, int64 ``[B, T]``, padded on the right.
        completion_mask: 1 for real tokens, ``[B, T]``.
        advantages: float ``[B]``, or ``[B, T]``.
        old_per_token_logps: log-probabilities of the policy that sampled, float ``[B, T]``; ``None`` if on-policy.
        old_logps: RLOO's, of whole sequences, float ``[B]``.
    """

    advantages: torch.Tensor
    old_per_token_logps: torch.Tensor | None
    old_logps: torch.Tensor
