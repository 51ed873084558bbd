"""Read a tile of logits, turn it into its gradient and add its products, with torch's own operations.

A tile holds the logits of a few tokens over the whole vocabulary, ``[n, V]``. Triton's passes in
:mod:`memprof.grpo.loss.fused_kernels` give the same results; :mod:`memprof.grpo.loss.passes` chooses between the two.

With ``z`` a token's final logits, ``lse = logsumexp(z)``, ``p = exp(z - lse)`` and ``H`` its entropy:

    log p_target = z_target - lse              d/dz_j = [j = target] - p_j
    H = lse - sum_j p_j z_j                    d/dz_j = -p_j (log p_j + H)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: fp32 bytes that one step of a torch pass works on: on the CPU about what its caches hold, so that a pass reads
#: memory once; elsewhere a bound on temporaries.
_CPU_BLOCK_BYTES = 8 << 20
DEVICE_BLOCK_BYTES = 64 << 20
#: vocabulary rows converted at a time where a product's operands must be fp32.
_CONVERTED_ROWS = 8192

#: Log-probabilities, logsumexp and entropies (or None), each ``[n]`` fp32.
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
        """Return the derivative, but for the cap's slope."""
        return self.scale * self.inverse_temperature


def tile_stats(tile: torch.Tensor, targets: torch.Tensor, transform: Transform, want_entropy: bool) -> Stats:
    """Compute log-probabilities of ``targets``, logsumexp and entropies of a tile's rows; the tile stays as it is."""
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
    limit = _CPU_BLOCK_BYTES if tile.device.type == "cpu" else DEVICE_BLOCK_BYTES
    rows = max(1, limit // (4 * vocabulary))
    return [slice(start, min(start + rows, n)) for start in range(0, n, rows)]


def _final_logits(
    block: torch.Tensor, transform: Transform, *, in_place: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return fp32 logits and, where there is a cap, its slope; without ``in_place`` the block stays as it is."""
    z = block.float()
    if transform.softcap is None:
        if transform.factor == 1:
            return z, None
        return (z.mul_(transform.factor) if in_place or z is not block else z * transform.factor), None
    t = torch.tanh(z * (transform.scale / transform.softcap))
    return t * (transform.softcap * transform.inverse_temperature), 1 - t * t


def accumulate(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, first: bool, fp32_products: bool) -> None:
    """Add ``a @ b`` to an fp32 ``total [R, C]``, or write it there where ``first`` (``total`` need not be zeroed).

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
