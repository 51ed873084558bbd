"""Say why a rank holds more of a category than the others do, where that is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What grows with the tokens of a rank's own batch.
_BY_TOKENS = {"activations", "activation_gradients", "loss_logits"}


def known_reason(category: str, own: Mapping[str, Any], usual: int, median_tokens: int | None) -> str:
    """Return why a rank holds more of ``category`` (or of ``"non_torch"``) than the median rank; "" if not known.

    Tokens are a reason where both ranks counted them; so is a median rank that holds none.

    Args:
        category: a category's id, or ``non_torch``.
        own: the summary of the rank.
        usual: the median rank's bytes of it.
        median_tokens: the tokens in the step of the median rank, None where no rank counted them.
    """
    tokens = own.get("tokens")
    if category in _BY_TOKENS and isinstance(tokens, int) and median_tokens:
        if tokens > median_tokens:
            return f"{tokens:,} tokens in that step where the median rank had {median_tokens:,}"
        return f"not more tokens ({tokens:,}; the median rank had {median_tokens:,})"
    return "the median rank holds none" if not usual else ""
