"""Choose the scaled-dot-product kernel that CUDA would run, and run that one's fake.

``scaled_dot_product_attention`` itself is replaced: backward would take a mode off, and a recomputed layer would then
choose another kernel than its forward. The rules are those of torch's ``sdp_utils.cpp`` and ``attention.cpp``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from memprof.compat import torch as torch_names

_FLASH: Any = torch_names.FLASH.get()
_EFFICIENT: Any = torch_names.EFFICIENT.get()
_SAFE_SOFTMAX: Any = torch_names.SAFE_SOFTMAX.get()
_HALF = (torch.float16, torch.bfloat16)
_AMPERE = (8, 0)
# Cards whose multiprocessors have too little shared memory for flash's backward over heads of 193 to 224.
_SMALL_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
DEFAULT_CAPABILITY = (9, 0)  # of a card that is not named


def sdpa_choice(
    query: Any,
    key: Any,
    mask: Any,
    enable_gqa: bool,
    wanted: str | None,
    capability: tuple[int, int] = DEFAULT_CAPABILITY,
) -> str:
    """Choose ``flash``, ``efficient`` or ``math``; ``wanted`` limits the choice where that kernel can run at all.

    Before compute capability 8.0 there is no flash kernel and no efficient one for bfloat16; grouped heads, which only
    flash takes as they are, then fall to ``math``.
    """
    if wanted == "math":
        return "math"
    if wanted != "efficient" and mask is None and _flash_runs(query, key, capability):
        return "flash"
    grouped = enable_gqa and query.shape[1] != key.shape[1]
    known = query.dtype is torch.float16 or query.dtype is torch.float32 or capability >= _AMPERE
    return "efficient" if known and not grouped else "math"


def in_full_because(query: Any, key: Any, mask: Any, enable_gqa: bool, capability: tuple[int, int]) -> str:
    """Say why torch computes attention in full (``math``) on this card: tokens x tokens weights a head."""
    major, minor = capability
    card = f"compute capability {major}.{minor}" if major else "a GPU of unknown compute capability"
    no_flash = f"{card} has no flash kernel" if capability < _AMPERE else "flash supports neither masks nor such heads"
    if enable_gqa and query.shape[1] != key.shape[1]:
        return f"{no_flash}, and the memory-efficient ones don't support grouped heads"
    return f"{no_flash}, and no memory-efficient one for {str(query.dtype).removeprefix('torch.')}"


def _flash_runs(query: Any, key: Any, capability: tuple[int, int]) -> bool:
    width = query.shape[-1]
    if capability < _AMPERE or query.dtype not in _HALF or width > 256:
        return False
    trained = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    return not (trained and 192 < width <= 224 and capability in _SMALL_SHARED_MEMORY)


def cuda_attention(wanted: str | None, capability: tuple[int, int], tell: Callable[[str], None]) -> Any:
    """Make an attention that chooses as CUDA would; ``tell`` hears why it is computed in full unasked, each time."""

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = (t.to(dtype) if t.dtype is torch.float32 else t for t in (query, key, value))
            if attn_mask is not None and attn_mask.dtype is torch.float32:
                attn_mask = attn_mask.to(dtype)
        kind = sdpa_choice(query, key, attn_mask, enable_gqa, _possible(wanted, query, value), capability)
        if kind == "flash":
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if kind == "efficient":
            return _efficient(query, key, value, _bias(attn_mask, query.dtype), dropout_p, is_causal, scale)
        if wanted != "math":
            tell(in_full_because(query, key, attn_mask, enable_gqa, capability))
        bias = _bias(attn_mask, query.dtype)
        return _math(query, key, value, bias, dropout_p, is_causal, scale, enable_gqa)

    return attention


def _possible(wanted: str | None, query: Any, value: Any) -> str | None:
    """Leave flash out where values are not as wide as keys, which it does not take."""
    return wanted if wanted == "math" or query.shape[-1] == value.shape[-1] else "efficient"


def _flash(query: Any, key: Any, value: Any, dropout: float, causal: bool, scale: float | None) -> Any:
    width = query.shape[-1]
    scale = scale if scale is not None else 1 / math.sqrt(width)
    if width % 8:
        query, key, value = (functional.pad(t, (0, 8 - width % 8)) for t in (query, key, value))
    out = _FLASH(query, key, value, dropout, causal, scale=scale)[0]
    return out[..., :width] if width % 8 else out


def _efficient(query: Any, key: Any, value: Any, bias: Any, dropout: float, causal: bool, scale: float | None) -> Any:
    if bias is not None:
        if extra := -bias.shape[-1] % 8:  # the kernel wants aligned rows: a padded copy, seen through a slice
            bias = functional.pad(bias, (0, extra))[..., : bias.shape[-1]]
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    return _EFFICIENT(query, key, value, bias, needs_grad, dropout, causal, scale=scale)[0]


def _math(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: float | None, gqa: bool
) -> Any:
    """Follow ``_scaled_dot_product_attention_math``, which computes half precision in float32.

    It holds and frees tensors as the original does: all variables live to its end, and its second result (the weights
    in the queries' dtype) is made before the first.
    """
    kind = query.dtype
    wide_query, wide_key, wide_value = (t.float() if kind in _HALF else t for t in (query, key, value))
    root = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    scaled = wide_query * root
    if mask is None and causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = _bias(mask, scaled.dtype)
    keys, values = wide_key, wide_value
    if gqa and query.shape[1] != key.shape[1]:
        times = query.shape[1] // key.shape[1]
        keys, values = wide_key.repeat_interleave(times, 1), wide_value.repeat_interleave(times, 1)
    weights = scaled @ (keys.transpose(-2, -1) * root)
    if mask is not None:
        weights.add_(mask)
    weights = _SAFE_SOFTMAX(weights, -1)
    if dropout:
        weights = torch.dropout(weights, dropout, True)
    narrow = weights.to(kind)
    out = (weights @ values).to(kind)
    del weights, values, keys, scaled, mask, wide_value, wide_key, wide_query, narrow
    return out


def _bias(mask: Any, dtype: torch.dtype) -> Any:
    """Turn a boolean mask into one of zeros and minus infinities in the queries' dtype; None stays."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    lowest = torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device)
    return torch.where(mask, torch.scalar_tensor(0.0, dtype=dtype, device=mask.device), lowest)
