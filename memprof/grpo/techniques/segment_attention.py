"""Let sequences laid end to end each attend to itself and, where there is one, to a prefix they share.

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
from typing import Any

import torch
from torch.nn import functional

from memprof.compat.transformers import ATTENTION_FUNCTIONS, ATTENTION_KIND
from memprof.errors import UsageError
from memprof.foreign import Kwargs
from memprof.grpo.techniques.attention_kernels import attention_kernel
from memprof.grpo.techniques.shared_prefix import SharedPrefix

#: attention implementations of transformers in whose place segments run
_REPLACED = ("sdpa", "flash_attention_2", "flash_attention_3")
_MARK = "_memprof_segments"


@dataclass(frozen=True)
class PackedSequences:
    """The sequences in a row, of ``lengths`` in tokens. ``prefix``: what they attend to beside themselves; ``becomes``:
    the prefix that the row is to become; ``reached``: layers whose attention was given this."""

    lengths: tuple[int, ...]
    prefix: SharedPrefix | None = None
    becomes: SharedPrefix | None = None
    reached: set[int] = field(default_factory=set)

    @property
    def longest(self) -> int:
        """Count the positions that the longest sequence's last token looks back on, itself included."""
        return max(self.lengths) + (self.prefix.length if self.prefix is not None else 0)

    def check(self) -> None:
        """Refuse (UsageError), after the body has run, a model that did not hand this down: it has mixed the sequences
        up."""
        if not self.reached:
            raise UsageError(
                "packing and prefix_sharing put sequences in one row, and this model does not hand keyword arguments "
                "down to its attention function: leave both off."
            )


def segment_refusal(config: Any, longest: int) -> str | None:
    """Say why sequences of up to ``longest`` positions cannot run in segments exactly on a model of this ``config``, or
    None."""
    implementation = ATTENTION_KIND.of(config)
    if implementation not in _REPLACED:
        return f"attention is {implementation!r}: load the model with attn_implementation='sdpa'"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds - {"full_attention", "sliding_attention"}:
        return f"the model has layers of type {', '.join(sorted(kinds - {'full_attention', 'sliding_attention'}))}"
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in kinds or (window and getattr(config, "use_sliding_window", True))
    all_full = bool(getattr(config, "layer_types", None)) and kinds == {"full_attention"}
    if sliding and window and longest > window and not all_full:
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


def install_segment_attention() -> None:
    """Put the function in front of transformers' attention functions; doing it twice does nothing."""
    functions, _ = ATTENTION_FUNCTIONS.place()
    for name in _REPLACED:
        own = functions.get(name)
        if own is not None and not hasattr(own, _MARK):
            functions.register(name, _in_front_of(own))


def _in_front_of(own: Any) -> Any:
    @functools.wraps(own)
    def attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        segments = kwargs.pop("memprof_segments", None)
        if segments is None:
            return own(module, query, key, value, attention_mask, **kwargs)
        return _segmented(module, query, key, value, segments, kwargs), None

    setattr(attention, _MARK, True)
    return attention


def _segmented(module: Any, query: Any, key: Any, value: Any, segments: PackedSequences, kwargs: Kwargs) -> Any:
    """Attend within each segment: ``[1, heads, tokens, width]`` in, ``[1, tokens, heads, width]`` out."""
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


def _check(module: Any, segments: PackedSequences, kwargs: Kwargs) -> None:
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
