"""Bound from below what a lean run holds, from its model's shape: what cannot fit need not be simulated.

Every term is held at one instant by any run of these settings, and what is not sure is left out. A bound is
therefore never above the simulated peak, and a choice made with it is the choice made without. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping

from memprof.config.model_shape import FAMILIES, ModelShape
from memprof.config.settings import Settings
from memprof.units import DTYPE_BYTES


def least_bytes(settings: Settings, config: Mapping[str, object], piece_tokens: int) -> tuple[int, int]:
    """Return bytes that a lean run's training and generation hold at least, each beside the weights.

    ``piece_tokens``: how many tokens go through the model together in training.
    """
    shape = ModelShape.of(config)
    weights = _weights(settings, shape)
    return weights + _kept(settings, shape, piece_tokens), weights + _cache(settings, shape)


def _wide(settings: Settings) -> int:
    """Return the bytes of an element that a linear layer computes with."""
    return 2 if settings.mixed_precision != "no" else DTYPE_BYTES[settings.weights_dtype]


def _weights(settings: Settings, shape: ModelShape) -> int:
    if settings.divided:
        return 0
    if settings.load_in_4bit:
        return shape.matrices // 2
    return (shape.embeddings + shape.matrices) * DTYPE_BYTES[settings.weights_dtype]


def _kept(settings: Settings, shape: ModelShape, tokens: int) -> int:
    """Return what the layers keep for the backward of one piece; the first, whose input may need none, is left out."""
    if settings.prefix_sharing or settings.sharding == "tp":
        return 0
    stream = shape.hidden * min(DTYPE_BYTES[settings.weights_dtype], _wide(settings))
    kind = settings.checkpointing
    attention = gated = 0
    if shape.model_type in FAMILIES and "linear_attention" not in shape.layer_kinds:
        attention = shape.heads * shape.value_dim * _wide(settings)  # its output, which its own backward reads
        if not shape.experts:
            gated = 2 * shape.intermediate * _wide(settings)  # what both factors of SwiGLU's product were made of
    each = {
        "none": stream + attention + (0 if settings.tiled_mlp else gated),
        "selective": stream + attention,
        "full": stream,
    }.get(kind, 0)
    return (shape.layers - 1) * tokens * each


def _cache(settings: Settings, shape: ModelShape) -> int:
    """Return the keys and values of what generates together, at the last token."""
    whole = settings.generation == "hf" and settings.cache_implementation == "dynamic"
    if not whole or shape.model_type not in FAMILIES or settings.sharding == "tp":
        return 0
    rows = settings.per_device_train_batch_size * settings.generation_steps
    together = min(settings.generation_batch or 1, rows)
    return together * shape.kv_cache_bytes(settings.sequence_length - 1, _wide(settings))
