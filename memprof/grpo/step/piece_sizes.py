"""Size pieces where the settings do not: by what they hold beside the weights of the model at hand."""

from __future__ import annotations

from typing import Any

from memprof.config.model_shape import ModelShape
from memprof.config.piece_size import MOST_TOKENS, piece_tokens, small_bytes
from memprof.errors import InputError


class PieceSizes:
    """The sizes for one model. ``small_bytes``: what is small beside its weights."""

    def __init__(self, model: Any) -> None:
        self._weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        self._itemsize = model.dtype.itemsize
        self.small_bytes = small_bytes(self._weights)
        try:
            self._shape: ModelShape | None = ModelShape.of(model.config)
        except InputError:  # a family whose config has other names
            self._shape = None

    def of(self, settings: Any, checkpointing: str) -> tuple[int, int]:
        """Return the tokens of a piece with a graph, and of one without; ``checkpointing``: the kind in use."""
        if settings.max_tokens_per_piece is not None:
            return settings.max_tokens_per_piece, settings.max_tokens_per_piece
        if self._shape is None:
            return MOST_TOKENS, MOST_TOKENS
        whole = checkpointing in ("none", "mlp") or (checkpointing == "auto" and not settings.gradient_checkpointing)
        kept = self._shape.layers if whole else 0
        return (
            piece_tokens(self._shape, self._weights, self._itemsize, kept_layers=kept),
            piece_tokens(self._shape, self._weights, self._itemsize),
        )
