"""What is done to one tile of logits: the pass that reads it, the pass that turns it into its gradient, the products.

A tile holds the logits of a few tokens over the whole vocabulary, ``[n, V]``. Two implementations of the passes agree:
plain torch here, Triton in :mod:`memprof.grpo.loss.fused_kernels`. ``passes_for`` chooses, and says so once where a
GPU has to do without Triton.

With ``z`` a token's final logits, ``lse = logsumexp(z)``, ``p = exp(z - lse)`` and ``H`` its entropy:

    log p_target = z_target - lse              d/dz_j = [j = target] - p_j
    H = lse - sum_j p_j z_j                    d/dz_j = -p_j (log p_j + H)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

__all__ = ["Passes", "Transform", "accumulate", "passes_for", "shape_passes", "tile_gradient", "tile_stats"]

logger = logging.getLogger(__name__)

#: fp32 bytes that one step of a torch pass works on: on the CPU about what its caches hold, so that a pass reads
#: memory once; elsewhere a bound on temporaries.
_CPU_BLOCK_BYTES = 8 << 20
_DEVICE_BLOCK_BYTES = 64 << 20
#: vocabulary rows converted at a time where a product's operands must be fp32.
_CONVERTED_ROWS = 8192

Stats = tuple[torch.Tensor, torch.Tensor, "torch.Tensor | None"]


@dataclass(frozen=True)
class Transform:
    """From a head's product to the final logits, in fp32: ``cap(product * scale) / temperature``.

    ``softcap``: ``cap(x) = softcap * tanh(x / softcap)`` (Gemma); None: no cap.
    """

    scale: float = 1.0
    softcap: float | None = None
    inverse_temperature: float = 1.0

    @property
    def factor(self) -> float:
        """The derivative, but for the cap's slope."""
        return self.scale * self.inverse_temperature


@dataclass(frozen=True)
class Passes:
    """The passes over a tile for one kind of device.

    ``stats(tile, targets, transform, want_entropy)`` reads the tile and returns log-probabilities, logsumexp and
    entropies (or None), each ``[n]`` fp32. ``gradient(tile, targets, lse, entropies, dlogps, dentropies, transform)``
    overwrites it with the gradient with respect to what it held; ``transform.factor`` is already in ``dlogps`` and
    ``dentropies``. ``accumulate(total, a, b, first=, fp32_products=)``: see :func:`accumulate`. ``fp32_products``: bf16
    products may be added to fp32 sums as they are (tensor cores); elsewhere their operands are converted.
    """

    name: str
    stats: Callable[[torch.Tensor, torch.Tensor, Transform, bool], Stats]
    gradient: Callable[..., None]
    fp32_products: bool
    accumulate: Callable[..., None]


def passes_for(device: torch.device) -> Passes:
    """The passes to use on ``device``: Triton's on CUDA, ROCm and XPU; torch's elsewhere and without Triton."""
    if device.type in ("cuda", "xpu"):
        if find_spec("triton") is not None:
            from memprof.grpo.loss.fused_kernels import triton_gradient, triton_stats

            return Passes("triton", triton_stats, triton_gradient, _fp32_products(device), accumulate)
        _say_no_triton(device.type)
    return Passes("torch", tile_stats, tile_gradient, _fp32_products(device), accumulate)


def _fp32_products(device: torch.device) -> bool:
    """``torch.addmm(..., out_dtype=float32)`` of bf16 operands: CUDA, since torch 2.8."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return device.type == "cuda" and (major, minor) >= (2, 8)


@cache
def _say_no_triton(device_type: str) -> None:
    logger.warning(
        "Triton is not installed: log-probabilities on %s are computed with torch operations, slower and with "
        "temporaries of %d MiB.",
        device_type,
        _DEVICE_BLOCK_BYTES >> 20,
    )


def tile_stats(tile: torch.Tensor, targets: torch.Tensor, transform: Transform, want_entropy: bool) -> Stats:
    """Log-probabilities of ``targets``, logsumexp and entropies of the rows of ``tile``; the tile is left as it is."""
    n = tile.shape[0]
    logps = torch.empty(n, dtype=torch.float32, device=tile.device)
    lse = torch.empty_like(logps)
    entropies = torch.empty_like(logps) if want_entropy else None
    for rows in _row_blocks(tile):
        z, _ = _final_logits(tile[rows], transform)
        # Relative to the maximum, so that log-probabilities and entropies do not lose the digits of large logits.
        top = z.amax(-1)
        z = z - top[:, None]
        e = z.exp()
        total = e.sum(-1)
        log_total = total.log()
        torch.add(top, log_total, out=lse[rows])
        torch.sub(z.gather(1, targets[rows, None]).squeeze(1), log_total, out=logps[rows])
        if entropies is not None:
            torch.sub(log_total, e.mul_(z).sum(-1).div_(total), out=entropies[rows])
    return logps, lse, entropies


def tile_gradient(
    tile: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    entropies: torch.Tensor | None,
    dlogps: torch.Tensor | None,
    dentropies: torch.Tensor | None,
    transform: Transform,
) -> None:
    """Overwrite ``tile`` with the gradient of its rows' log-probabilities and entropies, weighted as given."""
    for rows in _row_blocks(tile):
        block = tile[rows]
        z, slope = _final_logits(block, transform, in_place=True)
        logp = z.sub_(lse[rows, None])
        if dentropies is None:
            assert dlogps is not None
            grad = logp.exp_().mul_(-dlogps[rows, None])
        else:
            assert entropies is not None
            p = logp.exp()
            grad = logp.add_(entropies[rows, None]).mul_(dentropies[rows, None])
            if dlogps is not None:
                grad.add_(dlogps[rows, None])
            grad.mul_(p).neg_()
        if dlogps is not None:
            grad.scatter_add_(1, targets[rows, None], dlogps[rows, None])
        if slope is not None:
            grad.mul_(slope)
        if grad is not block:
            block.copy_(grad)


def _row_blocks(tile: torch.Tensor) -> list[slice]:
    n, vocabulary = tile.shape
    limit = _CPU_BLOCK_BYTES if tile.device.type == "cpu" else _DEVICE_BLOCK_BYTES
    rows = max(1, limit // (4 * vocabulary))
    return [slice(start, min(start + rows, n)) for start in range(0, n, rows)]


def _final_logits(
    block: torch.Tensor, transform: Transform, *, in_place: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fp32 logits and, where there is a cap, its slope; without ``in_place`` the block is left as it is."""
    z = block.float()
    if transform.softcap is None:
        if transform.factor == 1:
            return z, None
        return (z.mul_(transform.factor) if in_place or z is not block else z * transform.factor), None
    t = torch.tanh(z * (transform.scale / transform.softcap))
    return t * (transform.softcap * transform.inverse_temperature), 1 - t * t


def accumulate(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, first: bool, fp32_products: bool) -> None:
    """``total += a @ b`` for an fp32 ``total [R, C]`` (``total = a @ b`` where ``first``: it need not be zeroed).

    The products of bf16 operands are summed in fp32, never rounded to bf16 in between: a sum of rounded parts biases
    training. Where the device cannot, ``a``'s rows are converted a block at a time.
    """
    if total.dtype == a.dtype == b.dtype:
        torch.addmm(total, a, b, beta=0 if first else 1, out=total)
    elif fp32_products:
        if first:
            torch.mm(a, b, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    elif a.shape[0] > _CONVERTED_ROWS:
        right = b.float()
        for start in range(0, a.shape[0], _CONVERTED_ROWS):
            rows = slice(start, start + _CONVERTED_ROWS)
            part = total[rows]
            torch.addmm(part, a[rows].float(), right, beta=0 if first else 1, out=part)
    else:
        for start in range(0, b.shape[0], _CONVERTED_ROWS):
            inner = slice(start, start + _CONVERTED_ROWS)
            torch.addmm(total, a[:, inner].float(), b[inner].float(), beta=0 if first and start == 0 else 1, out=total)


def shape_passes() -> Passes:
    """What Triton's passes allocate on a GPU and nothing else, for fake tensors that stand for a GPU's.

    The torch passes would run thousands of small operations there and allocate what the kernels do not.
    """

    def stats(tile: torch.Tensor, targets: torch.Tensor, transform: Transform, want_entropy: bool) -> Stats:
        logps = torch.empty(tile.shape[0], dtype=torch.float32, device=tile.device)
        return logps, torch.empty_like(logps), torch.empty_like(logps) if want_entropy else None

    def nothing(*_: object, **__: object) -> None:
        return None

    return Passes("shapes", stats, nothing, True, nothing)
