"""Choose the scaled-dot-product kernel that CUDA would run, and run that one's fake.

``scaled_dot_product_attention`` itself is replaced (not intercepted by a mode, which backward would take off, so that
a recomputed layer would choose another kernel than its forward). Rules: torch's ``sdp_utils.cpp`` and
``attention.cpp``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from memprof.compat import patching
from memprof.compat import torch as torch_names

__all__ = ["sdpa_choice", "use_cuda_attention"]

_FLASH: Any = torch_names.FLASH.get()
_EFFICIENT: Any = torch_names.EFFICIENT.get()
_HALF = (torch.float16, torch.bfloat16)


def sdpa_choice(query: Any, key: Any, mask: Any, enable_gqa: bool, wanted: str | None) -> str:
    """Choose ``flash``, ``efficient`` or ``math``; ``wanted`` limits the choice where that kernel can run at all."""
    grouped = query.shape[1] != key.shape[1]
    flash = mask is None and query.dtype in _HALF and query.shape[-1] <= 256
    efficient = not (enable_gqa and grouped)
    if wanted == "math":
        return "math"
    if flash and wanted != "efficient":
        return "flash"
    return "efficient" if efficient else "math"


def _attention(wanted: str | None) -> Any:
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
        kind = sdpa_choice(query, key, attn_mask, enable_gqa, wanted)
        if kind == "flash":
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if kind == "efficient":
            return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
        return _math(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    return attention


def _flash(query: Any, key: Any, value: Any, dropout: float, causal: bool, scale: float | None) -> Any:
    width = query.shape[-1]
    scale = scale if scale is not None else 1 / math.sqrt(width)
    if width % 8:
        query, key, value = (functional.pad(t, (0, 8 - width % 8)) for t in (query, key, value))
    out = _FLASH(query, key, value, dropout, causal, scale=scale)[0]
    return out[..., :width] if width % 8 else out


def _efficient(query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: float | None) -> Any:
    bias = None
    if mask is not None:
        bias = _bias(mask, query.dtype)
        if extra := -bias.shape[-1] % 16:  # the kernel wants aligned rows: a padded copy, seen through a slice
            bias = functional.pad(bias, (0, extra))[..., : bias.shape[-1]]
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    return _EFFICIENT(query, key, value, bias, needs_grad, dropout, causal, scale=scale)[0]


def _math(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: float | None, gqa: bool
) -> Any:
    if gqa and query.shape[1] != key.shape[1]:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    if mask is None and causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        mask = _bias(mask, query.dtype)
    root = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    scores = (query * root) @ (key.transpose(-2, -1) * root)
    if mask is not None:
        scores.add_(mask)
    weights = torch.softmax(scores, -1)
    if dropout:
        weights = torch.dropout(weights, dropout, True)
    return weights @ value


def _bias(mask: Any, dtype: torch.dtype) -> Any:
    """Turn a boolean mask into one of zeros and minus infinities in the queries' dtype."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)


@contextmanager
def use_cuda_attention(wanted: str | None = None) -> Iterator[None]:
    """Run attention as CUDA would choose, while open; ``wanted`` as in ``--attn``."""
    with patching((torch_names.ATTENTION, _attention(wanted))):
        yield
