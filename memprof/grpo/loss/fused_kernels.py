"""Pass over a tile of logits with Triton kernels: one read for statistics, one read and one write for gradients.

The results are those of :func:`memprof.grpo.loss.fused_tiles.tile_stats` and ``tile_gradient``, without their
temporaries.
Importing this module imports Triton; ``TRITON_INTERPRET=1``, set before, runs the kernels on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from memprof.grpo.loss.fused_tiles import Stats, Transform, tile_gradient, tile_stats

_STATS_BLOCK = 8192
_GRADIENT_BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _cap(y, softcap, inverse_temperature):  # type: ignore[no-untyped-def]
    # tanh(x) = 2 sigmoid(2x) - 1
    t = 2.0 * tl.sigmoid(2.0 * y / softcap) - 1.0
    return t, t * softcap * inverse_temperature


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _stats_kernel(  # type: ignore[no-untyped-def]
    tile_ptr,
    row_stride,
    targets_ptr,
    logps_ptr,
    lse_ptr,
    entropies_ptr,
    vocabulary,
    scale,
    softcap,
    inverse_temperature,
    HAS_CAP: tl.constexpr,
    WANT_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program a token. Sums are relative to the running maximum: large logits cost no digits.
    row = tl.program_id(0).to(tl.int64)
    row_ptr = tile_ptr + row * row_stride
    top = -1.0e38
    total = 0.0
    weighted = 0.0
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        z = tl.load(row_ptr + columns, mask=inside, other=0.0).to(tl.float32) * scale
        if HAS_CAP:
            _, z = _cap(z, softcap, inverse_temperature)
        else:
            z = z * inverse_temperature
        new_top = tl.maximum(top, tl.max(tl.where(inside, z, -1.0e38), axis=0))
        shrink = tl.exp(top - new_top)
        z = tl.where(inside, z - new_top, 0.0)
        e = tl.where(inside, tl.exp(z), 0.0)
        if WANT_ENTROPY:
            weighted = shrink * (weighted + total * (top - new_top)) + tl.sum(e * z, axis=0)
        total = shrink * total + tl.sum(e, axis=0)
        top = new_top
    log_total = tl.log(total)
    z = tl.load(row_ptr + tl.load(targets_ptr + row)).to(tl.float32) * scale
    if HAS_CAP:
        _, z = _cap(z, softcap, inverse_temperature)
    else:
        z = z * inverse_temperature
    tl.store(logps_ptr + row, (z - top) - log_total)
    tl.store(lse_ptr + row, top + log_total)
    if WANT_ENTROPY:
        tl.store(entropies_ptr + row, log_total - weighted / total)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _gradient_kernel(  # type: ignore[no-untyped-def]
    tile_ptr,
    row_stride,
    targets_ptr,
    lse_ptr,
    entropies_ptr,
    dlogps_ptr,
    dentropies_ptr,
    vocabulary,
    scale,
    softcap,
    inverse_temperature,
    HAS_CAP: tl.constexpr,
    HAS_DLOGPS: tl.constexpr,
    HAS_DENTROPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    ptrs = tile_ptr + row * row_stride + columns
    z = tl.load(ptrs, mask=inside, other=0.0).to(tl.float32) * scale
    if HAS_CAP:
        t, z = _cap(z, softcap, inverse_temperature)
    else:
        z = z * inverse_temperature
    logp = z - tl.load(lse_ptr + row)
    p = tl.exp(logp)
    weight = tl.zeros((BLOCK,), dtype=tl.float32)
    if HAS_DLOGPS:
        weight += tl.load(dlogps_ptr + row)
    if HAS_DENTROPIES:
        weight += tl.load(dentropies_ptr + row) * (logp + tl.load(entropies_ptr + row))
    grad = -p * weight
    if HAS_DLOGPS:
        grad += tl.where(columns == tl.load(targets_ptr + row), tl.load(dlogps_ptr + row), 0.0)
    if HAS_CAP:
        grad *= 1.0 - t * t
    tl.store(ptrs, grad.to(tile_ptr.dtype.element_ty), mask=inside)


def _stats_tile(
    tile: torch.Tensor,
    _row_stride: int,
    targets: torch.Tensor,
    logps: torch.Tensor,
    lse: torch.Tensor,
    entropies: torch.Tensor,
    _vocabulary: int,
    scale: float,
    softcap: float,
    inverse_temperature: float,
    has_cap: bool,
    want_entropy: bool,
    _block: int,
) -> None:
    """Do as ``_stats_kernel`` in torch's operations: ``memprof emulate`` calls it, where no kernel runs."""
    transform = Transform(scale, softcap if has_cap else None, inverse_temperature)
    found = tile_stats(tile, targets, transform, want_entropy)
    for out, values in zip((logps, lse, entropies) if want_entropy else (logps, lse), found, strict=False):
        assert values is not None
        out.copy_(values)


def _gradient_tile(
    tile: torch.Tensor,
    _row_stride: int,
    targets: torch.Tensor,
    lse: torch.Tensor,
    entropies: torch.Tensor,
    dlogps: torch.Tensor,
    dentropies: torch.Tensor,
    _vocabulary: int,
    scale: float,
    softcap: float,
    inverse_temperature: float,
    has_cap: bool,
    has_dlogps: bool,
    has_dentropies: bool,
    _block: int,
) -> None:
    """Do as ``_gradient_kernel`` in torch's operations."""
    transform = Transform(scale, softcap if has_cap else None, inverse_temperature)
    tile_gradient(
        tile, targets, lse, entropies, dlogps if has_dlogps else None, dentropies if has_dentropies else None, transform
    )


def triton_stats(tile: torch.Tensor, targets: torch.Tensor, transform: Transform, want_entropy: bool) -> Stats:
    """Do as :func:`memprof.grpo.loss.fused_tiles.tile_stats`."""
    n, vocabulary = tile.shape
    logps = torch.empty(n, dtype=torch.float32, device=tile.device)
    lse = torch.empty_like(logps)
    entropies = torch.empty_like(logps) if want_entropy else None
    if n:
        with torch.cuda.device_of(tile):  # type: ignore[no-untyped-call]
            _stats_kernel[(n,)](
                tile,
                tile.stride(0),
                targets.contiguous(),
                logps,
                lse,
                lse if entropies is None else entropies,
                vocabulary,
                *_constants(transform),
                HAS_CAP=transform.softcap is not None,
                WANT_ENTROPY=want_entropy,
                BLOCK=min(_STATS_BLOCK, triton.next_power_of_2(vocabulary)),
                num_warps=8,
            )
    return logps, lse, entropies


def triton_gradient(
    tile: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    entropies: torch.Tensor | None,
    dlogps: torch.Tensor | None,
    dentropies: torch.Tensor | None,
    transform: Transform,
) -> None:
    """Do as :func:`memprof.grpo.loss.fused_tiles.tile_gradient`."""
    n, vocabulary = tile.shape
    if not n:
        return
    with torch.cuda.device_of(tile):  # type: ignore[no-untyped-call]
        _gradient_kernel[(n, triton.cdiv(vocabulary, _GRADIENT_BLOCK))](
            tile,
            tile.stride(0),
            targets.contiguous(),
            lse.contiguous(),
            lse if entropies is None else entropies.contiguous(),
            lse if dlogps is None else dlogps.contiguous(),
            lse if dentropies is None else dentropies.contiguous(),
            vocabulary,
            *_constants(transform),
            HAS_CAP=transform.softcap is not None,
            HAS_DLOGPS=dlogps is not None,
            HAS_DENTROPIES=dentropies is not None,
            BLOCK=_GRADIENT_BLOCK,
            num_warps=4,
        )


def _constants(transform: Transform) -> tuple[float, float, float]:
    return transform.scale, transform.softcap or 1.0, transform.inverse_temperature
