"""What ``auto`` means for a sequence's length: techniques that cost nothing worth their bytes when it is short.

A decoder layer's input is kept for backward: ``layers * tokens * hidden`` values a sequence. From
:data:`OFFLOAD_FROM_BYTES` of them on, they go to pinned host memory while the device computes the next layer. The
feed-forward network, the widest part of a layer, runs in tiles once a sequence is longer than a tile; inside a
checkpointed layer that costs no arithmetic, because the layer is computed again anyway.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.grpo.layers import decoder_layers, is_mixture_of_experts, mlp_of, text_config

__all__ = ["OFFLOAD_FROM_BYTES", "TILE_TOKENS", "checkpointing_of", "device_kind", "tile_of"]

OFFLOAD_FROM_BYTES = 2 << 30
#: Large enough that each of a tile's products keeps a GPU busy.
TILE_TOKENS = 4096


def device_kind(device: torch.device) -> str:
    """``cuda``, ``cpu`` ...: a function, so that a simulation can say which device its tensors stand for."""
    return device.type


def checkpointing_of(args: Any, model: Any, device: torch.device) -> str:
    """The kind of checkpointing for ``args.checkpointing``: ``auto`` is TRL's own, on CUDA offloaded if long.

    The length known in advance is the completion's.
    """
    if args.checkpointing != "auto" or not args.gradient_checkpointing or device_kind(device) != "cuda":
        return str(args.checkpointing)
    return "offloaded" if _boundary_bytes(args, model) >= OFFLOAD_FROM_BYTES else "auto"


def tile_of(args: Any, model: Any) -> int | None:
    """Tokens of an MLP's tile for ``args.tiled_mlp``; 0 there is off.

    None tiles what is longer than :data:`TILE_TOKENS` under ``checkpointing="auto"``, where layers are checkpointed and
    their MLP can be tiled. A kind of checkpointing that is named is that and no more.
    """
    if args.tiled_mlp is not None:
        return int(args.tiled_mlp) or None
    recomputed = args.checkpointing == "auto" and args.gradient_checkpointing
    longer = (args.max_completion_length or 0) > TILE_TOKENS
    return TILE_TOKENS if recomputed and longer and _can_tile(model) else None


def _boundary_bytes(args: Any, model: Any) -> int:
    config = text_config(model)
    itemsize = model.dtype.itemsize
    return int(config.num_hidden_layers * (args.max_completion_length or 0) * config.hidden_size * itemsize)


def _can_tile(model: Any) -> bool:
    return not any(is_mixture_of_experts(mlp_of(layer)) for layer in decoder_layers(model))
