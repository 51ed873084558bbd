"""Name the usual reason why a rank holds more of a category than the others do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["usual_reason"]

_LONGER = "longer or more sequences on this rank: each rank pads to its own longest, not to a common length"
_LOADED = "the model was loaded on this rank only"
_GATHERED = "whole tensors gathered on this rank, as when a full state dict is saved or weights are sent to an engine"
_UNEVEN = "shards of uneven size: a layer that does not divide by the number of ranks, or a wrapper left out"

_REASONS = {
    "weights": f"{_UNEVEN}; or {_GATHERED}",
    "adapters": _UNEVEN,
    "weight_casts": _GATHERED,
    "reference_model": _LOADED,
    "reward_model": _LOADED,
    "value_model": _LOADED,
    "gradients": _UNEVEN,
    "optimizer_state": _UNEVEN,
    "activations": _LONGER,
    "activation_gradients": _LONGER,
    "loss_logits": _LONGER,
    "kv_cache": "longer or more prompts in its share of the generation batch, or an engine that runs on this rank only",
    "inference_engine": "the engine runs on this rank only",
    "inputs": "a longer rollout buffer, or metrics and texts gathered to this rank",
    "temporaries": "work that only this rank does: logging, evaluating, saving",
    "communication": "this rank receives what the others send (gathering objects, broadcasting weights)",
    "workspace": "libraries that only this rank uses",
    "unattributed": "allocations that no evidence explains; see the rank's own report",
}
_FIRST = {
    "weights": _GATHERED,
    "weight_casts": _GATHERED,
    "temporaries": "the main process also saves, logs and evaluates",
    "communication": "the main process receives what the others send (gathered metrics, state dicts)",
    "inputs": "the main process receives gathered completions and metrics to log",
    "inference_engine": "the engine, or its client, lives in the main process",
    "reward_model": "the reward model was loaded in the main process only",
}
_OUTSIDE = (
    "other processes made a CUDA context on its device: every rank that touches CUDA before it chooses its own device "
    "makes one on device 0"
)


def usual_reason(category: str, rank: int, own: Mapping[str, Any], median_tokens: int | None) -> str:
    """Return the usual reason why a rank holds more of ``category`` (or of ``"non_torch"``) than the median rank.

    Where tokens were counted, the sentence tells whether they explain the difference.
    """
    tokens = own.get("tokens")
    if _REASONS.get(category) == _LONGER and isinstance(tokens, int) and median_tokens:
        if tokens > median_tokens:
            return f"{tokens:,} tokens in that step where the median rank had {median_tokens:,}"
        return f"not more tokens ({tokens:,}; the median rank had {median_tokens:,}), but work that only this rank does"
    if category == "non_torch":
        return _OUTSIDE
    if rank == 0 and category in _FIRST:
        return _FIRST[category]
    return _REASONS.get(category, "")
