"""Say where sequences are longer than the positions that a model was made for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["notes_on_length", "positions_of"]

# Scalings whose config says how far positions reach with them, and from where.
_FROM_ORIGINAL = ("yarn", "longrope", "llama3")
# Rows of a position table before its first position, in OPT's.
_OFFSETS = (0, 2)


def notes_on_length(model: Any, tokens: int) -> list[str]:
    """Say in a sentence that sequences of ``tokens`` are longer than the model's positions reach; else nothing."""
    reach = positions_of(model.config)
    if reach is None or tokens <= reach:
        return []
    told = f"Sequences of {tokens:,} tokens are longer than this model's positions reach ({reach:,} tokens)"
    if _has_table(model, reach):
        return [f"{told}: a real run ends in an index error, since each position has a row of its own."]
    return [f"{told}: memory is what a run of this length needs, and the model was not trained for it."]


def positions_of(config: Any) -> int | None:
    """Return how many tokens a model's positions reach, scaled as transformers scales them; None: no limit is known."""
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1 or getattr(text, "alibi", False):
        return None
    return max([limit, *(_scaled(limit, rope) for rope in _ropes(text))])


def _ropes(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the rotary parameters: one set of the model's, or one of each kind of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    yield from (found,) if "rope_type" in found else (part for part in found.values() if isinstance(part, dict))


def _scaled(limit: int, rope: dict[str, Any]) -> int:
    kind, factor = rope.get("rope_type"), rope.get("factor")
    if not isinstance(factor, (int, float)):
        return limit
    if kind in ("linear", "dynamic"):
        return int(limit * factor)
    # These say from where they stretch; max_position_embeddings may hold that length or the stretched one.
    original = rope.get("original_max_position_embeddings") or limit
    return int(original * factor) if kind in _FROM_ORIGINAL else limit


def _has_table(model: Any, reach: int) -> bool:
    tokens = model.get_input_embeddings()
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding) and module is not tokens)
    return any(table.num_embeddings - reach in _OFFSETS for table in tables)
