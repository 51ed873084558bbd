"""Choose how many tokens go through a model together where memory matters: by what they hold beside its weights."""

from __future__ import annotations

from memprof.config.model_shape import ModelShape

#: What a piece may hold beyond one sequence, as a share of the weights: too little to see in a peak.
_SHARE = 64
#: Bytes that a piece may hold in any case. A row of fewer than 200 to 300 tokens alone keeps a processor less busy than
#: TRL's whole micro-batch (``benchmarks.lean crossing``), and 1/64 of the weights of a small model are fewer tokens.
LEAST_BYTES = 32 << 20
#: More tokens do not make a GPU faster.
MOST_TOKENS = 2048
# Tensors of one layer alive at its highest in backward: of the model's width, and of the MLP's inner one.
_WIDE, _INNER = 12, 4


def small_bytes(weights_bytes: int) -> int:
    """Return the bytes that are small beside ``weights_bytes`` of weights."""
    return weights_bytes // _SHARE


def piece_tokens(shape: ModelShape, weights_bytes: int, itemsize: int, *, kept_layers: int | None = None) -> int:
    """Choose how many tokens of several sequences go through the model together: at most :data:`MOST_TOKENS`.

    They hold 1/64 of the weights' bytes, or :data:`LEAST_BYTES` if that is more.

    ``kept_layers``: layers of which all is kept until backward, beside every layer's input; None: nothing is kept, as
    without a graph.
    """
    room = max(small_bytes(weights_bytes), LEAST_BYTES)
    layer = _WIDE * shape.hidden + _INNER * max(shape.intermediate, shape.expert_intermediate)
    kept = 0 if kept_layers is None else shape.layers * shape.hidden + kept_layers * layer
    return max(1, min(MOST_TOKENS, room // (itemsize * (layer + kept))))
