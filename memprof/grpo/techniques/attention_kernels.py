"""Run torch's fused attention kernels with their logsumexp, forward and backward, on the CPU and on GPUs."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from memprof.compat import torch as torch_names
from memprof.compat.targets import Target


@dataclass(frozen=True)
class AttentionKernel:
    """A fused attention that gives its logsumexp ``[B, heads, tokens]`` and takes one back.

    ``forward(q, k, v, causal, scale) -> (out, lse, extra)``; ``backward(dout, q, k, v, out, lse, extra, causal, scale)
    -> (dq, dk, dv)``. Fewer key/value heads than query heads are allowed.
    """

    forward: Any
    backward: Any


def attention_kernel(query: torch.Tensor) -> AttentionKernel:
    """Choose the kernel for ``query``'s device, dtype and width."""
    if query.device.type == "cpu":
        return AttentionKernel(_cpu_forward, _cpu_backward)
    return gpu_kernel(query)


def gpu_kernel(query: torch.Tensor) -> AttentionKernel:
    """Choose the kernel for ``query``'s dtype and width on a GPU."""
    if query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256:
        return AttentionKernel(_flash_forward, _flash_backward)
    return AttentionKernel(_efficient_forward, _efficient_backward)


def _cpu_forward(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    out, lse = _operator(torch_names.FLASH_ON_CPU)(q, k, v, 0.0, causal, scale=scale)
    return out, lse, None


def _cpu_backward(d: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, extra: Any, causal: bool, scale: float) -> Any:
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)  # the layout its forward returns
    return _operator(torch_names.FLASH_ON_CPU_BACKWARD)(d, q, k, v, out, lse, 0.0, causal, scale=scale)


def _flash_forward(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    width = q.shape[-1]
    out, lse, *rest = _operator(torch_names.FLASH)(*(_padded(t) for t in (q, k, v)), 0.0, causal, scale=scale)
    return out[..., :width], lse, tuple(rest[:6])


def _flash_backward(d: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, extra: Any, causal: bool, scale: float) -> Any:
    width = q.shape[-1]
    d, q, k, v, out = (_padded(t) for t in (d, q, k, v, out))
    cum_q, cum_k, max_q, max_k, seed, offset = extra
    grads = _operator(torch_names.FLASH_BACKWARD)(
        d, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset, scale=scale
    )
    return tuple(g[..., :width] for g in grads)


def _padded(t: torch.Tensor) -> torch.Tensor:
    """Widen to a multiple of 8, which the flash kernel asks for."""
    extra = -t.shape[-1] % 8
    return functional.pad(t, (0, extra)) if extra else t


def _efficient_forward(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    k, v = (_repeated(t, q) for t in (k, v))
    out, lse, seed, offset = _operator(torch_names.EFFICIENT)(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]], (seed, offset)


def _efficient_backward(
    d: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, extra: Any, causal: bool, scale: float
) -> Any:
    heads = k.shape[1]
    k, v = (_repeated(t, q) for t in (k, v))
    lse = functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)  # rows in blocks of 32, as its forward has them
    dq, dk, dv, _ = _operator(torch_names.EFFICIENT_BACKWARD)(
        d, q, k, v, None, out, lse, *extra, 0.0, [True, True, True, False], causal, scale=scale
    )
    return dq, *(g.unflatten(1, (heads, -1)).sum(2) for g in (dk, dv))


def _repeated(t: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    times = query.shape[1] // t.shape[1]
    return t if times == 1 else t.repeat_interleave(times, 1)


@functools.cache
def _operator(target: Target) -> Any:
    return target.get()
