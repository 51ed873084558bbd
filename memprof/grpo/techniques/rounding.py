"""Train bf16 weights without losing small updates: the new weight is rounded up or down at random.

bf16 keeps 8 bits of a weight: an update below 1/512 of it rounds back to where it was, always, and GRPO's usual
learning rates make nearly all updates that small. Rounded with probabilities in proportion to the distances, the
weight is right on average, and no fp32 copy of it (4 B/param) is held.

What is drawn follows from seed, step and parameter. All ranks of a run draw the same, so that weights that are equal
before a step are equal after it; the generators of dropout and sampling, which differ by rank, are left alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from memprof.foreign import Kwargs
from memprof.grpo.once_log import OnceLog

_SWITCH = "stochastic_rounding='never' accepts it as it is"
# Elements that are updated together: about 26 bytes of temporaries each.
_CHUNK = 1 << 21


def round_to_bf16(values: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Round fp32 to bf16, up with the probability of the part that is cut off: the expectation is ``values``.

    Values bf16 holds exactly, infinities and NaN among them, stay.
    """
    bits = values.contiguous().view(torch.int32)
    # Adding to the low half carries into bf16's last bit just as often as that half says.
    rounded = torch.empty_like(bits).random_(0, 1 << 16, generator=generator).add_(bits).bitwise_and_(-1 << 16)
    return torch.where(torch.isfinite(values), rounded.view(torch.float32), values).to(torch.bfloat16)


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, as ``torch.optim.AdamW``) with stochastic rounding of bf16 weights.

    Moments have the weights' dtype, as torch's own: 2 + 2 B/param in bf16, rounded at random too, or the second
    moment's slow decay (1 - beta2 = 1/1000 of a step's share) would be lost. Weights of other dtypes are updated
    plainly. A parameter is updated in chunks: at most 64 MiB of fp32 temporaries. What is drawn follows from ``seed``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        seed: int = 0,
        **unused: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._seed = seed

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what was pickled, or what a checkpoint holds, which has no seed."""
        super().__setstate__(state)
        self.__dict__.setdefault("_seed", 0)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle what torch's optimizers do, and the seed."""
        return {**super().__getstate__(), "_seed": self._seed}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in parameters:  # of all before any is updated: a step that runs out of memory can be repeated
            if parameter.grad is not None and not self.state[parameter]:
                self.state[parameter].update(_empty_state(parameter))
        generators: dict[torch.device, torch.Generator] = {}
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if parameter.device not in generators:
                        generators[parameter.device] = torch.Generator(parameter.device)
                    self._update(parameter, group, number, generators[parameter.device])
                number += 1
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], number: int, generator: torch.Generator) -> None:
        state = self.state[parameter]
        state["step"] += 1
        step = int(state["step"])
        generator.manual_seed(_mixed(self._seed, step, number))
        tensors = [parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]]
        for weight, grad, mean, square in zip(*(_chunks(t, tensors) for t in tensors), strict=True):
            _update_chunk(weight, grad, mean, square, step, group, generator)


def _empty_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Make a count of steps, which stays on the host, and two moments."""
    return {"step": _no_steps(), **{name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}}


def _no_steps() -> torch.Tensor:
    return torch.zeros(())


def _update_chunk(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    step: int,
    group: dict[str, Any],
    generator: torch.Generator,
) -> None:
    """Update a part of a weight and of its two moments in place."""
    keep_first, keep_second = group["betas"]
    grad = gradient.float()
    mean = _copy(first).lerp_(grad, 1 - keep_first)
    square = _copy(second).mul_(keep_second).addcmul_(grad, grad, value=1 - keep_second)
    del grad
    _store(first, mean, generator)
    _store(second, square, generator)
    denominator = square.div_(1 - keep_second**step).sqrt_().add_(group["eps"])
    new = _copy(weight).mul_(1 - group["lr"] * group["weight_decay"])
    new.addcdiv_(mean, denominator, value=-group["lr"] / (1 - keep_first**step))
    del mean, square, denominator
    _store(weight, new, generator)


def _chunks(tensor: torch.Tensor, together: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return views of a tensor that are updated one after the other: stretches of its memory where all the tensors
    ``together`` lie in memory alike, else slices of its first dimension."""
    if all(t.is_contiguous() for t in together):
        return torch.split(tensor.view(-1), _CHUNK)
    if tensor.dim() == 0:
        return [tensor]
    rows = max(1, _CHUNK * tensor.shape[0] // max(1, tensor.numel()))
    return torch.split(tensor, rows)


def _mixed(*numbers: int) -> int:
    """Return 63 bits that follow from the numbers, on any machine."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _copy(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float32, copy=True)


def _store(where: torch.Tensor, values: torch.Tensor, generator: torch.Generator) -> None:
    where.copy_(round_to_bf16(values, generator) if where.dtype == torch.bfloat16 else values)


def drawing_alike(kind: Any, seed: int) -> Any:
    """Return an optimizer class whose step draws from torch's generators, seeded by ``seed`` and the step, and puts
    them back: all ranks draw the same."""

    class DrawingAlike(kind):  # type: ignore[misc, unused-ignore]
        _calls = 0

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            device = self.param_groups[0]["params"][0].device
            on_cuda = device.type == "cuda"
            # Steps before a checkpoint are in the state's own count.
            steps = next((int(state["step"]) for state in self.state.values() if "step" in state), 0)
            self._calls += 1
            drawn = _mixed(seed, steps, self._calls)
            with torch.random.fork_rng([device] if on_cuda else []):
                torch.default_generator.manual_seed(drawn)
                if on_cuda:
                    with torch.cuda.device(device):
                        torch.cuda.manual_seed(drawn)
                return super().step(closure)

    DrawingAlike.__name__, DrawingAlike.__qualname__ = kind.__name__, kind.__qualname__
    return DrawingAlike


def trains_in_bf16(model: Any) -> bool:
    """Tell whether most of what is trained is bf16: then an update below 1/512 of a weight is lost to rounding."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    low = sum(parameter.numel() for parameter in trained if parameter.dtype == torch.bfloat16)
    return bool(2 * low > sum(parameter.numel() for parameter in trained))


def rounded_optimizer(
    model: Any, kind: Any, keywords: Kwargs, log: OnceLog, *, sharded: bool, seed: int = 0
) -> tuple[Any, Kwargs]:
    """Return transformers' choice of optimizer, or one with stochastic rounding where bf16 weights would lose updates.

    torch's AdamW becomes :class:`StochasticAdamW` (same state, so checkpoints fit both), torchao's AdamW rounds when
    told to. For others, and where FSDP or DeepSpeed has ``sharded`` the model, a warning says what is lost.
    """
    if not trains_in_bf16(model):
        return kind, keywords
    if sharded:
        log.warn("bf16 weights are trained without stochastic rounding under FSDP and DeepSpeed")
        return kind, keywords
    if kind is torch.optim.AdamW:
        log.warn(f"unlike TRL, bf16 weights are trained by AdamW with stochastic rounding ({_SWITCH})")
        kept = {name: value for name, value in keywords.items() if name in ("lr", "betas", "eps", "weight_decay")}
        return StochasticAdamW, {**kept, "seed": seed}
    if kind.__module__.partition(".")[0] == "torchao":
        log.warn(f"unlike TRL, torchao's {kind.__name__} trains bf16 weights with stochastic rounding ({_SWITCH})")
        return drawing_alike(kind, seed), {**keywords, "bf16_stochastic_round": True}
    log.warn(
        f"bf16 weights are trained by {kind.__name__}, which rounds to nearest: updates below 1/512 of a weight are "
        "lost. Load the model in float32, or use optim='adamw_torch' or 'adamw_torch_8bit'."
    )
    return kind, keywords
