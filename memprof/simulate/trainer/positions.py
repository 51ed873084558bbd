"""Say where sequences are longer than the positions that a model was made for."""

from __future__ import annotations

from typing import Any

from torch import nn

from memprof.config.model_shape import positions_of

# Rows of a position table before its first position, in OPT's.
_OFFSETS = (0, 2)


def notes_on_length(model: Any, tokens: int) -> list[str]:
    """Say in a sentence that sequences of ``tokens`` are longer than the model's positions reach; else nothing."""
    reach = positions_of(model.config.get_text_config(decoder=True))
    if reach is None or tokens <= reach:
        return []
    told = f"Sequences of {tokens:,} tokens are longer than this model's positions reach ({reach:,} tokens)"
    if _has_table(model, reach):
        return [f"{told}: a real run ends in an index error, since each position has a row of its own."]
    return [f"{told}: memory is what a run of this length needs, and the model was not trained for it."]


def _has_table(model: Any, reach: int) -> bool:
    tokens = model.get_input_embeddings()
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding) and module is not tokens)
    return any(table.num_embeddings - reach in _OFFSETS for table in tables)
