"""Attention of several sequences laid end to end, each to itself and, where there is one, to a prefix they share.

A body called with ``memprof_segments=Segments(...)`` hands it down to its attention function, where transformers' own
is replaced for that call: every segment is causal in itself, and with a prefix all tokens also attend to the prefix's
keys and values. No mask exists. The two parts of a softmax are joined by their logsumexp:

    out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse),   lse = log(exp lse_1 + exp lse_2)

and the fused kernels' own backward, given the joined ``out`` and ``lse``, yields each part's exact gradients (the step
of ring attention). Called without ``memprof_segments``, the function registered here is transformers' own.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from memprof.errors import UsageError

if TYPE_CHECKING:
    from memprof.grpo.techniques.prefix import SharedPrefix

__all__ = ["Segments", "attention_kernel", "gpu_kernel", "install_segment_attention", "segment_refusal"]

_ATEN = torch.ops.aten
#: attention implementations of transformers in whose place segments run
_REPLACED = ("sdpa", "flash_attention_2", "flash_attention_3")
_MARK = "_memprof_segments"


@dataclass(frozen=True)
class Segments:
    """``lengths`` of the sequences in the row; the prefix they attend to; or the prefix this row is to become.

    ``reached``: layers whose attention was given this.
    """

    lengths: tuple[int, ...]
    prefix: SharedPrefix | None = None
    becomes: SharedPrefix | None = None
    reached: set[int] = field(default_factory=set)

    @property
    def longest(self) -> int:
        """Positions that the last token of the longest sequence looks back on, itself included."""
        return max(self.lengths) + (self.prefix.length if self.prefix is not None else 0)

    def check(self) -> None:
        """After the body has run: a model that does not hand its arguments down would have mixed the sequences up.

        Raises:
            UsageError: no layer's attention was given the segments.
        """
        if not self.reached:
            raise UsageError(
                "Sequences in one row: this model does not hand keyword arguments down to its attention function."
            )


def segment_refusal(config: Any, longest: int) -> str | None:
    """Why sequences of up to ``longest`` positions cannot run in segments on a model of this ``config``, or None.

    What is refused would not be exact: windows and chunks shorter than the sequences, state-space layers, rotary
    embeddings that change with the length of the call, capped or biased attention scores.
    """
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in _REPLACED:
        return f"attention is {implementation!r}: load the model with attn_implementation='sdpa'"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds - {"full_attention", "sliding_attention"}:
        return f"the model has layers of type {', '.join(sorted(kinds - {'full_attention', 'sliding_attention'}))}"
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in kinds or (window and getattr(config, "use_sliding_window", True))
    if sliding and window and longest > window and not _all_full(config):
        return f"its sliding window of {window} tokens is shorter than {longest} positions"
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in rope.values() if rope and all(isinstance(v, dict) for v in rope.values()) else [rope]:
        kind = parameters.get("rope_type", "default")
        native = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
        if kind in ("dynamic", "longrope") and longest > native:
            return f"its {kind} rotary embedding changes beyond {native} positions"
    if getattr(config, "attn_logit_softcapping", None):
        return "its attention scores are capped"
    if getattr(config, "num_kv_shared_layers", 0):
        return "its layers share keys and values"
    return None


def _all_full(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    return kinds is not None and set(kinds) == {"full_attention"}


def install_segment_attention() -> None:
    """Put the function in front of transformers' attention functions; doing it twice does nothing."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in _REPLACED:
        own = ALL_ATTENTION_FUNCTIONS.get(name)
        if own is not None and not hasattr(own, _MARK):
            ALL_ATTENTION_FUNCTIONS.register(name, _in_front_of(own))


def _in_front_of(own: Any) -> Any:
    @functools.wraps(own)
    def attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        segments = kwargs.pop("memprof_segments", None)
        if segments is None:
            return own(module, query, key, value, attention_mask, **kwargs)
        return _segmented(module, query, key, value, segments, kwargs), None

    setattr(attention, _MARK, True)
    return attention


def _segmented(module: Any, query: Any, key: Any, value: Any, segments: Segments, kwargs: dict[str, Any]) -> Any:
    """``[1, heads, tokens, width]`` in, ``[1, tokens, heads, width]`` out, as transformers' functions."""
    _check(module, segments, kwargs)
    segments.reached.add(module.layer_idx)
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = kwargs.get("scaling")
    if segments.becomes is not None:
        segments.becomes.keep(module.layer_idx, key, value)
    if segments.prefix is None:
        out = _causal(query, key, value, segments.lengths, scale)
    else:
        prefix_key, prefix_value = segments.prefix.layer(module.layer_idx)
        scale = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
        out = _PrefixAttention.apply(  # type: ignore[no-untyped-call]
            query, key, value, prefix_key, prefix_value, segments.lengths, scale
        )
    return out.transpose(1, 2).contiguous()


def _check(module: Any, segments: Segments, kwargs: dict[str, Any]) -> None:
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UsageError(f"Sequences in one row: {type(module).__name__} has {name}, which is not supported there.")
    if kwargs.get("dropout"):
        raise UsageError("Sequences in one row need attention_dropout=0.")
    window = kwargs.get("sliding_window")
    if window is not None and segments.longest > window:
        raise UsageError(f"Sequences in one row: a sliding window of {window} is shorter than {segments.longest}.")


def _causal(query: Any, key: Any, value: Any, lengths: tuple[int, ...], scale: float | None) -> Any:
    grouped = query.shape[1] != key.shape[1]
    outs = [
        functional.scaled_dot_product_attention(
            query[:, :, rows], key[:, :, rows], value[:, :, rows], is_causal=True, scale=scale, enable_gqa=grouped
        )
        for rows in _rows(lengths)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


def _rows(lengths: tuple[int, ...]) -> list[slice]:
    rows, start = [], 0
    for length in lengths:
        rows.append(slice(start, start + length))
        start += length
    return rows


class _PrefixAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        prefix_key: torch.Tensor,
        prefix_value: torch.Tensor,
        lengths: tuple[int, ...],
        scale: float,
    ) -> torch.Tensor:
        kernel = attention_kernel(query)
        out, lse, ctx.extra = kernel.forward(query, prefix_key, prefix_value, False, scale)
        joined, joined_lse = torch.empty_like(query), torch.empty_like(lse, memory_format=torch.contiguous_format)
        ctx.extras = []
        for rows in _rows(lengths):
            own, own_lse, extra = kernel.forward(query[:, :, rows], key[:, :, rows], value[:, :, rows], True, scale)
            ctx.extras.append(extra)
            both = torch.logaddexp(lse[:, :, rows], own_lse)
            joined_lse[:, :, rows] = both
            part = out[:, :, rows] * torch.exp(lse[:, :, rows] - both)[..., None]
            joined[:, :, rows] = part.addcmul_(own.to(part.dtype), torch.exp(own_lse - both)[..., None])
        ctx.save_for_backward(query, key, value, prefix_key, prefix_value, joined, joined_lse)
        ctx.lengths, ctx.scale = lengths, scale
        return joined

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, prefix_key, prefix_value, out, lse = ctx.saved_tensors
        kernel = attention_kernel(query)
        dout = dout.contiguous()
        dquery, dprefix_key, dprefix_value = kernel.backward(
            dout, query, prefix_key, prefix_value, out, lse, ctx.extra, False, ctx.scale
        )
        dkey, dvalue = torch.empty_like(key), torch.empty_like(value)
        for rows, extra in zip(_rows(ctx.lengths), ctx.extras, strict=True):
            q, k, v, o, d = (t[:, :, rows] for t in (query, key, value, out, dout))
            dq, dk, dv = kernel.backward(d, q, k, v, o, lse[:, :, rows].contiguous(), extra, True, ctx.scale)
            dquery[:, :, rows] += dq
            dkey[:, :, rows], dvalue[:, :, rows] = dk, dv
        return dquery, dkey, dvalue, dprefix_key, dprefix_value, None, None


@dataclass(frozen=True)
class AttentionKernel:
    """A fused attention that gives its logsumexp ``[B, heads, tokens]`` and takes one back.

    ``forward(q, k, v, causal, scale) -> (out, lse, extra)``; ``backward(dout, q, k, v, out, lse, extra, causal, scale)
    -> (dq, dk, dv)``. Fewer key/value heads than query heads are allowed.
    """

    forward: Any
    backward: Any


def attention_kernel(query: torch.Tensor) -> AttentionKernel:
    """The kernel for ``query``'s device, dtype and width."""
    if query.device.type == "cpu":
        return AttentionKernel(_cpu_forward, _cpu_backward)
    return gpu_kernel(query)


def gpu_kernel(query: torch.Tensor) -> AttentionKernel:
    """The kernel for ``query``'s dtype and width on a GPU."""
    if query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256:
        return AttentionKernel(_flash_forward, _flash_backward)
    return AttentionKernel(_efficient_forward, _efficient_backward)


def _cpu_forward(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse, None


def _cpu_backward(d: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, extra: Any, causal: bool, scale: float) -> Any:
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)  # the layout its forward returns
    return _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(d, q, k, v, out, lse, 0.0, causal, scale=scale)


def _flash_forward(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    width = q.shape[-1]
    out, lse, *rest = _ATEN._scaled_dot_product_flash_attention(
        *(_padded(t) for t in (q, k, v)), 0.0, causal, scale=scale
    )
    return out[..., :width], lse, tuple(rest[:6])


def _flash_backward(d: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, extra: Any, causal: bool, scale: float) -> Any:
    width = q.shape[-1]
    d, q, k, v, out = (_padded(t) for t in (d, q, k, v, out))
    cum_q, cum_k, max_q, max_k, seed, offset = extra
    grads = _ATEN._scaled_dot_product_flash_attention_backward(
        d, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset, scale=scale
    )
    return tuple(g[..., :width] for g in grads)


def _padded(t: torch.Tensor) -> torch.Tensor:
    """The flash kernel takes widths that are multiples of 8."""
    extra = -t.shape[-1] % 8
    return functional.pad(t, (0, extra)) if extra else t


def _efficient_forward(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    k, v = (_repeated(t, q) for t in (k, v))
    out, lse, seed, offset = _ATEN._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]], (seed, offset)


def _efficient_backward(
    d: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, extra: Any, causal: bool, scale: float
) -> Any:
    heads = k.shape[1]
    k, v = (_repeated(t, q) for t in (k, v))
    lse = functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)  # rows in blocks of 32, as its forward has them
    dq, dk, dv, _ = _ATEN._scaled_dot_product_efficient_attention_backward(
        d, q, k, v, None, out, lse, *extra, 0.0, [True, True, True, False], causal, scale=scale
    )
    return dq, *(g.unflatten(1, (heads, -1)).sum(2) for g in (dk, dv))


def _repeated(t: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    times = query.shape[1] // t.shape[1]
    return t if times == 1 else t.repeat_interleave(times, 1)
