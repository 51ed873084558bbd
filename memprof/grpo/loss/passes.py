"""Choose who passes over a tile of logits: Triton's kernels, torch's operations, or in a simulation nobody."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

from memprof.grpo.loss import fused_tiles
from memprof.grpo.loss.fused_tiles import Stats, Transform, accumulate

logger = logging.getLogger(__name__)


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
    """Choose the passes for ``device``: Triton's on CUDA, ROCm and XPU; torch's elsewhere and without Triton."""
    if device.type in ("cuda", "xpu"):
        if find_spec("triton") is not None:
            from memprof.grpo.loss.fused_kernels import triton_gradient, triton_stats

            return Passes("triton", triton_stats, triton_gradient, _fp32_products(device), accumulate)
        _say_no_triton(device.type)
    return Passes("torch", fused_tiles.tile_stats, fused_tiles.tile_gradient, _fp32_products(device), accumulate)


def _fp32_products(device: torch.device) -> bool:
    """Tell whether ``torch.addmm`` takes ``out_dtype=float32`` for bf16 operands: CUDA, since torch 2.8."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return device.type == "cuda" and (major, minor) >= (2, 8)


@cache
def _say_no_triton(device_type: str) -> None:
    logger.warning(
        "Triton is not installed: log-probabilities on %s are computed with torch operations, slower and with "
        "temporaries of %d MiB.",
        device_type,
        fused_tiles.DEVICE_BLOCK_BYTES >> 20,
    )


def shape_passes() -> Passes:
    """Return passes that allocate what Triton's do and compute nothing, for fake tensors that stand for a GPU's."""

    def stats(tile: torch.Tensor, targets: torch.Tensor, transform: Transform, want_entropy: bool) -> Stats:
        logps = torch.empty(tile.shape[0], dtype=torch.float32, device=tile.device)
        return logps, torch.empty_like(logps), torch.empty_like(logps) if want_entropy else None

    def nothing(*_: object, **__: object) -> None:
        return None

    return Passes("shapes", stats, nothing, True, nothing)
