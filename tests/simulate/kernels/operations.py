"""Operations whose kernels ask the allocator for more than their result, to be run on CUDA and on fake tensors alike.

Each is a function of a device that makes its arguments and returns what is to be observed, as a function of nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

Work = Callable[[], Any]

#: dtype, width of a head, a mask, fewer heads for keys, told of it, gradients wanted
ATTENTION = [
    (*case, grouped, told)
    for case in itertools.product(
        ("bfloat16", "float16", "float32"), (64, 96, 128, 192, 256, 512), (False, True), (False, True)
    )
    for grouped, told in ((False, False), (True, True))
]


def attention_arguments(
    dtype: str, width: int, masked: bool, grad: bool, grouped: bool, device: str
) -> tuple[Any, ...]:
    """Make queries, keys, values ``[1, heads, 128, width]`` and a mask or None."""
    kind = getattr(torch, dtype)
    query = torch.empty(1, 4, 128, width, dtype=kind, device=device, requires_grad=grad)
    key = torch.empty(1, 2 if grouped else 4, 128, width, dtype=kind, device=device, requires_grad=grad)
    mask = torch.ones(1, 1, 128, 128, dtype=torch.bool, device=device) if masked else None
    return query, key, key.clone(), mask


def _sum(shape: tuple[int, ...], over: Any, dtype: str = "bfloat16", how: str = "sum") -> Callable[[str], Work]:
    def make(device: str) -> Work:
        x = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        return lambda: getattr(x, how)(**({} if over is None else {"dim": over}))

    return make


def _norm(shape: tuple[int, ...], dtype: str) -> Callable[[str], Work]:
    def make(device: str) -> Work:
        x = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        return lambda: torch.linalg.vector_norm(x)

    return make


def _norms(sizes: tuple[int, ...], dtype: str) -> Callable[[str], Work]:
    def make(device: str) -> Work:
        tensors = [torch.empty(n, dtype=getattr(torch, dtype), device=device) for n in sizes]
        return lambda: torch._foreach_norm(tensors, 2.0)

    return make


def _masked_scatter(shape: tuple[int, ...], rows: tuple[int, ...] | None = None) -> Callable[[str], Work]:
    """``rows``: of the mask, which is expanded over the rest of ``shape``."""

    def make(device: str) -> Work:
        x = torch.empty(shape, device=device)
        mask = torch.ones(rows or shape, dtype=torch.bool, device=device)
        wide = mask.unsqueeze(-1).expand(shape) if rows else mask
        return lambda: x.masked_scatter(wide, x)

    return make


def _layer_norm(backward: bool) -> Callable[[str], Work]:
    """Normalise the rows of a transposed tensor, as a vision tower's patches are."""

    def make(device: str) -> Work:
        x, weight = torch.empty(8, 128, 256, device=device).transpose(1, 2), torch.empty(128, device=device)
        mean = torch.empty(8, 256, 1, device=device)
        if backward:
            aten, wanted = torch.ops.aten, [True, False, False]
            return lambda: aten.native_layer_norm_backward(x, x, [128], mean, mean, weight, weight, wanted)
        return lambda: torch.native_layer_norm(x, [128], weight, weight, 1e-5)

    return make


def _linear() -> Callable[[str], Work]:
    """Multiply a transposed tensor and add a bias, as torch's multi-head attention does with its input."""

    def make(device: str) -> Work:
        x = torch.empty(256, 8, 128, dtype=torch.bfloat16, device=device).transpose(0, 1)
        weight, bias = (torch.empty(*shape, dtype=x.dtype, device=device) for shape in ((384, 128), (384,)))
        return lambda: functional.linear(x, weight, bias)

    return make


def _embedding_backward(ids: int) -> Callable[[str], Work]:
    def make(device: str) -> Work:
        grad = torch.empty(ids, 64, device=device)
        index = torch.zeros(ids, dtype=torch.long, device=device)
        return lambda: torch.ops.aten.embedding_dense_backward(grad, index, 5000, -1, False)

    return make


def _index_put(rows: int, accumulate: bool) -> Callable[[str], Work]:
    def make(device: str) -> Work:
        x, index = torch.empty(5000, 64, device=device), torch.zeros(rows, dtype=torch.long, device=device)
        values = torch.empty(rows, 64, device=device)
        return lambda: torch.ops.aten.index_put_(x, [index], values, accumulate)

    return make


def _attention(dtype: str, tokens: int, heads: int, kv_heads: int, width: int, kind: str) -> Callable[[str], Work]:
    """Run a kernel forward and backward, called by its own name."""

    def make(device: str) -> Work:
        q = torch.empty(2, heads, tokens, width, dtype=getattr(torch, dtype), device=device)
        k = torch.empty(2, kv_heads, tokens, width, dtype=getattr(torch, dtype), device=device)
        aten = torch.ops.aten

        def flash() -> Any:
            out = aten._scaled_dot_product_flash_attention(q, k, k, 0.0, True, scale=0.1)
            grads = aten._scaled_dot_product_flash_attention_backward(
                out[0], q, k, k, out[0], out[1], None, None, tokens, tokens, 0.0, True, out[6], out[7], scale=0.1
            )
            return out, grads

        def efficient() -> Any:
            out = aten._scaled_dot_product_efficient_attention(q, k, k, None, True, 0.0, True, scale=0.1)
            wanted = [True, True, True, False]
            grads = aten._scaled_dot_product_efficient_attention_backward(
                out[0], q, k, k, None, out[0], out[1], out[2], out[3], 0.0, wanted, True, scale=0.1
            )
            return out, grads

        return flash if kind == "flash" else efficient

    return make


def _chosen_attention(dtype: str, tokens: int, heads: int, kv_heads: int, width: int, masked: bool) -> Any:
    """Run the kernel that torch chooses, forward and backward, with grouped heads: before Ampere all of it."""

    def make(device: str) -> Work:
        def made(*shape: int) -> Any:
            return torch.empty(2, *shape, dtype=getattr(torch, dtype), device=device, requires_grad=True)

        q, k, v = made(heads, tokens, width), made(kv_heads, tokens, width), made(kv_heads, tokens, width)
        mask = torch.ones(2, 1, tokens, tokens, dtype=torch.bool, device=device).tril() if masked else None

        def work() -> Any:
            out = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=not masked, enable_gqa=heads > kv_heads
            )
            return torch.autograd.grad(out, [q, k, v], torch.empty_like(out))

        return work

    return make


def _softmax_backward(shape: tuple[int, ...], dtype: str) -> Callable[[str], Work]:
    def make(device: str) -> Work:
        x = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        return lambda: torch.ops.aten._softmax_backward_data(x, x, -1, x.dtype)

    return make


def _multinomial(rows: int, columns: int) -> Callable[[str], Work]:
    def make(device: str) -> Work:
        scores = torch.ones(rows, columns, device=device)
        return lambda: torch.multinomial(scores, 1)

    return make


def _product(rows: int, width: int) -> Callable[[str], Work]:
    def make(device: str) -> Work:
        x = torch.empty(rows, width, dtype=torch.bfloat16, device=device)
        w = torch.empty(width, width, dtype=torch.bfloat16, device=device)
        return lambda: functional.linear(x, w)

    return make


OPERATIONS: dict[str, Callable[[str], Work]] = {
    **{f"sum {shape} over {over} {dtype}": _sum(shape, over, dtype) for shape, over, dtype in [
        ((2048, 896), 0, "bfloat16"), ((8, 256, 896), (0, 1), "bfloat16"), ((8, 256, 128), (0, 1), "bfloat16"),
        ((2, 1000, 2048), (0, 1), "float32"), ((8, 2048, 4096), (0, 1), "float32"),
        ((1, 20480, 4096), (0, 1), "bfloat16"), ((20480, 14336), 0, "bfloat16"), ((300, 50), 0, "float32"),
        ((512, 63), 0, "float32"),
        ((64, 8192), 1, "float32"),
        ((3, 100000), 1, "bfloat16"), ((2, 2, 500000), -1, "float32"), ((8, 20480), None, "float32"),
        ((8, 20480), None, "bool"), ((8, 255), None, "bool"), ((8, 255), 1, "int32"),
        ((5_000_000,), None, "bfloat16"),
        ((4, 14, 300, 64), (0, 2), "bfloat16"), ((16, 7, 1000), 1, "float32"),
    ]},
    "mean (8, 4096, 1024) over -1": _sum((8, 4096, 1024), -1, "float32", "mean"),
    "mean (4, 300000) over 1": _sum((4, 300000), 1, "float32", "mean"),
    "mean of all (1000000,)": _sum((1_000_000,), None, "float32", "mean"),
    "norm (896, 896) bfloat16": _norm((896, 896), "bfloat16"),
    "norm (4096, 4096) float32": _norm((4096, 4096), "float32"),
    "norm (290,) float32": _norm((290,), "float32"),
    "norms of three bfloat16": _norms((896 * 4864, 896, 100), "bfloat16"),
    "norms of two float32": _norms((64, 70_000), "float32"),
    **{f"masked_scatter {shape}": _masked_scatter(shape) for shape in [(8, 255), (8, 2047), (2, 20479)]},
    "masked_scatter of an expanded mask": _masked_scatter((8, 452, 64), (8, 452)),
    "layer_norm of a transposed tensor": _layer_norm(backward=False),
    "backward of layer_norm of a transposed tensor": _layer_norm(backward=True),
    **{f"embedding backward of {ids}": _embedding_backward(ids) for ids in (2048, 4096, 40960)},
    **{f"index_put of {n}, accumulate {add}": _index_put(n, add) for n in (1536, 40_000) for add in (False, True)},
    **{f"{kind} {dtype} {tokens} tokens, {heads}/{kv} heads of {width}":
           _attention(dtype, tokens, heads, kv, width, kind)
       for kind, dtype, tokens, heads, kv, width in [
           ("flash", "bfloat16", 256, 14, 2, 64), ("flash", "bfloat16", 2048, 32, 8, 128),
           ("flash", "float16", 300, 4, 4, 96),
           ("flash", "bfloat16", 4096, 4, 4, 128),
           ("flash", "bfloat16", 1, 32, 8, 128),
           ("efficient", "bfloat16", 300, 4, 4, 64),
           ("efficient", "float32", 256, 14, 14, 64), ("efficient", "float16", 2048, 32, 32, 128),
       ]},
    "a product, with its workspace": _product(2048, 896),
    "linear with a bias of a transposed tensor": _linear(),
    # After the product: who multiplies first is given the workspace.
    **{f"attention {dtype} {tokens} tokens, {heads}/{kv} heads of {width}{', masked' * masked}":
           _chosen_attention(dtype, tokens, heads, kv, width, masked)
       for dtype, tokens, heads, kv, width, masked in [
           ("float16", 256, 14, 2, 64, False), ("bfloat16", 300, 4, 4, 128, True), ("float16", 300, 4, 2, 64, True),
           ("float16", 292, 4, 4, 128, True),
       ]},
    **{f"multinomial ({rows}, {columns})": _multinomial(rows, columns)
       for rows, columns in [(8, 4000), (2, 128256), (64, 32000), (8, 600_000)]},
    "backward of softmax (4, 300, 300) float16": _softmax_backward((4, 300, 300), "float16"),
}  # fmt: skip
