"""A Triton kernel that nobody keeps a torch version of: a function of its own, reductions, masks."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def shifted(z, shift):  # type: ignore[no-untyped-def]
    return tl.sigmoid(z - shift) + z * z


@triton.jit
def shifted_softmax(x_ptr, out_ptr, n, shift, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    z = shifted(tl.load(x_ptr + row * n + columns, mask=inside, other=0.0), shift)
    z = tl.where(inside, z, -float("inf"))
    e = tl.exp(z - tl.max(z, axis=0))
    tl.store(out_ptr + row * n + columns, e / tl.sum(e, axis=0), mask=inside)


def shifted_softmax_in_torch(x: torch.Tensor, shift: float) -> Any:
    return torch.softmax(torch.sigmoid(x - shift) + x * x, -1)
