"""Add up the gradients of many pieces in fp32 where the weights, and so their gradients, are bf16.

A gradient in bf16 has 8 bits: adding one piece's to the sum of a hundred others loses most of it. While pieces are
run, the parameters' gradients go into fp32 sums as soon as autograd has them; before the last piece the sums are
rounded into ``.grad``, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from memprof.grpo.once_log import OnceLog

#: Sums this small beside all weights of the model are kept without being asked for.
SMALL_SHARE = 1 / 16
#: From so many pieces on; two are one addition, which TRL's own accumulation makes too.
_MANY = 3


def gradient_sums(
    wanted: str, model: Any, pieces: int, *, sharded: bool, log: OnceLog
) -> AbstractContextManager[Mapping[torch.Tensor, torch.Tensor]]:
    """Return a context in which gradients of ``model``'s bf16 parameters are summed in fp32, or one that does nothing.

    What it yields is the sums by parameter. ``wanted``: ``fp32``, ``never``, or ``auto``: where the sums take at most
    :data:`SMALL_SHARE` of the weights' bytes. With fewer than three ``pieces`` nothing is lost. ``sharded``: the
    parameters are parts of larger ones (FSDP, DeepSpeed), whose gradients are not at hand.
    """
    parameters = _in_bf16(model) if pieces >= _MANY and wanted != "never" else []
    if not parameters:
        return nullcontext({})
    gib = f"{_bytes_of_sums(parameters) / 2**30:.2f} GiB"
    if sharded:
        log.say("gradients of chunks are added up in bf16: FSDP and DeepSpeed shard them")
        return nullcontext({})
    if not are_summed(wanted, model, pieces, sharded=sharded):
        log.say(f"gradients of chunks are added up in bf16; gradient_sums='fp32' uses {gib} while chunks run")
        return nullcontext({})
    log.say(f"gradients of chunks are added up in fp32: {gib} while chunks run")
    return _summing(parameters)


def are_summed(wanted: str, model: Any, pieces: int, *, sharded: bool) -> bool:
    """Tell whether :func:`gradient_sums`, asked the same, adds up in fp32."""
    if pieces < _MANY or wanted == "never" or sharded:
        return False
    needed = _bytes_of_sums(_in_bf16(model))
    return needed > 0 and (wanted == "fp32" or needed <= SMALL_SHARE * sum(p.nbytes for p in model.parameters()))


def _in_bf16(model: Any) -> list[torch.Tensor]:
    return [p for p in model.parameters() if p.requires_grad and p.dtype == torch.bfloat16]


def _bytes_of_sums(parameters: Sequence[torch.Tensor]) -> int:
    return 4 * sum(parameter.numel() for parameter in parameters)


@contextmanager
def _summing(parameters: Sequence[torch.Tensor]) -> Iterator[Mapping[torch.Tensor, torch.Tensor]]:
    before = [parameter.grad for parameter in parameters]
    sums: dict[torch.Tensor, torch.Tensor] = {}

    def add(parameter: torch.Tensor) -> None:
        part, parameter.grad = parameter.grad, None
        if part is None:
            return
        total = sums.get(parameter)
        if total is None:
            sums[parameter] = part.float()
        else:
            total.add_(part)

    hooks = []
    for parameter in parameters:
        parameter.grad = None
        hooks.append(parameter.register_post_accumulate_grad_hook(add))  # type: ignore[no-untyped-call]
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, earlier in zip(parameters, before, strict=True):
            parameter.grad = _rounded(parameter, earlier, sums.pop(parameter, None))


def _rounded(parameter: torch.Tensor, earlier: torch.Tensor | None, total: torch.Tensor | None) -> torch.Tensor | None:
    """Return a parameter's gradient of earlier micro-batches with the sum of this one's pieces."""
    if total is None:
        return earlier
    if earlier is None:
        return total.to(parameter.dtype)
    return earlier.copy_(total.add_(earlier))
