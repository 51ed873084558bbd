"""Know the memory that CUDA kernels ask for inside one operation and give back before it returns.

No dispatch shows it. Each entry is read from the kernel's own source (named beside it), and is modelled, not
executed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.compat import torch as torch_names

__all__ = ["hidden_bytes"]


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _flash_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: list[Any]) -> list[int]:
    """Follow flash-attention 2's ``mha_bwd``: fp32 dQ accumulator, softmax sums, dK and dV before groups are summed."""
    grad, query, key = args[0], args[1], args[2]
    batch, heads, tokens, width = query.shape
    kv_heads, kv_tokens = key.shape[1], key.shape[2]
    rounded = _up(tokens, 128)
    sizes = [batch * heads * rounded * 4, batch * heads * rounded * _up(width, 32) * 4]
    if heads != kv_heads:
        sizes += [batch * kv_tokens * heads * width * grad.element_size()] * 2
    return sizes


def _efficient_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: list[Any]) -> list[int]:
    """Follow memory-efficient attention's backward: row sums of grad · output, and an fp32 dQ if the output is half."""
    query = args[1]
    batch, heads, tokens, width = query.shape
    sizes = [batch * heads * tokens * 4]
    if query.element_size() < 4:
        sizes.append(batch * heads * _up(tokens, 64) * _up(width, 32) * 4)
    return sizes


def _embedding_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: list[Any]) -> list[int]:
    """Follow ``embedding_dense_backward_cuda``: ids sorted with their positions, and the sort's buffers."""
    ids = args[1].numel()
    return [ids * 8] * 4 if ids > 3072 else []


_Hidden = Callable[[tuple[Any, ...], "dict[str, Any]", "list[Any]"], "list[int]"]
_HIDDEN: dict[Any, _Hidden] = {
    torch_names.FLASH_BACKWARD.get(): _flash_backward,
    torch_names.EFFICIENT_BACKWARD.get(): _efficient_backward,
    torch.ops.aten.embedding_dense_backward.default: _embedding_backward,
}


def hidden_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: list[Any]) -> list[int]:
    """List the sizes of what ``func``'s CUDA kernel allocates beside its results."""
    model = _HIDDEN.get(func)
    return model(args, kwargs, out) if model is not None else []
