"""Train bf16 weights without losing small updates: the new weight is rounded up or down at random.

bf16 keeps 8 bits of a weight: an update below 1/512 of it rounds back to where it was, always, and GRPO's usual
learning rates make nearly all updates that small. Rounded with probabilities in proportion to the distances, the
weight is right on average, and no fp32 copy of it (4 B/param) is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from memprof.grpo.once_log import OnceLog

__all__ = ["StochasticAdamW", "round_to_bf16", "rounded_optimizer", "trains_in_bf16"]


def round_to_bf16(values: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Round fp32 to bf16, up with the probability of the part that is cut off: the expectation is ``values``.

    Values bf16 holds exactly, infinities and NaN among them, stay.
    """
    bits = values.contiguous().view(torch.int32)
    noise = torch.empty_like(bits).random_(0, 1 << 16, generator=generator)
    # Adding to the low half carries into bf16's last bit just as often as that half says.
    rounded = (bits + noise).bitwise_and_(-1 << 16).view(torch.float32)
    return torch.where(torch.isfinite(values), rounded, values).to(torch.bfloat16)


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, as ``torch.optim.AdamW``) with stochastic rounding of bf16 weights.

    Moments have the weights' dtype, as torch's own: 2 + 2 B/param in bf16, rounded at random too, or the second
    moment's slow decay (1 - beta2 = 1/1000 of a step's share) would be lost. Weights of other dtypes are updated
    plainly. One parameter at a time: fp32 temporaries of the largest parameter, not of all.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **unused: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step = float(state["step"])
        first, second = group["betas"]
        grad = parameter.grad.float()  # type: ignore[union-attr]
        mean = _copy(state["exp_avg"]).lerp_(grad, 1 - first)
        square = _copy(state["exp_avg_sq"]).mul_(second).addcmul_(grad, grad, value=1 - second)
        _store(state["exp_avg"], mean)
        _store(state["exp_avg_sq"], square)
        denominator = square.div_(1 - second**step).sqrt_().add_(group["eps"])
        weight = _copy(parameter).mul_(1 - group["lr"] * group["weight_decay"])
        weight.addcdiv_(mean, denominator, value=-group["lr"] / (1 - first**step))
        _store(parameter, weight)


def _copy(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float32, copy=True)


def _store(where: torch.Tensor, values: torch.Tensor) -> None:
    where.copy_(round_to_bf16(values) if where.dtype == torch.bfloat16 else values)


def trains_in_bf16(model: Any) -> bool:
    """Tell whether most of what is trained is bf16: then an update below 1/512 of a weight is lost to rounding."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    low = sum(parameter.numel() for parameter in trained if parameter.dtype == torch.bfloat16)
    return bool(2 * low > sum(parameter.numel() for parameter in trained))


def rounded_optimizer(
    model: Any, kind: Any, keywords: dict[str, Any], log: OnceLog, *, sharded: bool
) -> tuple[Any, dict[str, Any]]:
    """Return transformers' choice of optimizer, or one with stochastic rounding where bf16 weights would lose updates.

    torch's AdamW becomes :class:`StochasticAdamW` (same state, so checkpoints fit both), torchao's 8-bit and 4-bit
    AdamW round when told to. For others, and where FSDP or DeepSpeed has ``sharded`` the model, a warning says what is
    lost.
    """
    if not trains_in_bf16(model):
        return kind, keywords
    if sharded:
        log.warn("bf16 weights are trained without stochastic rounding under FSDP and DeepSpeed")
        return kind, keywords
    if kind is torch.optim.AdamW:
        log.say("bf16 weights are trained: AdamW with stochastic rounding")
        kept = {name: value for name, value in keywords.items() if name in ("lr", "betas", "eps", "weight_decay")}
        return StochasticAdamW, kept
    if kind.__module__.partition(".")[0] == "torchao":
        log.say(f"bf16 weights are trained: torchao's {kind.__name__} with stochastic rounding")
        return kind, {**keywords, "bf16_stochastic_round": True}
    log.warn(
        f"bf16 weights are trained by {kind.__name__}, which rounds to nearest: updates below 1/512 of a weight are "
        "lost. Load the model in float32, or use optim='adamw_torch' or 'adamw_torch_8bit'."
    )
    return kind, keywords
