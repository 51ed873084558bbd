"""Stand in for optimizers whose packages need a GPU: their state is made, their kernels work in place.

What the state weighs is in :mod:`memprof.config.optimizers`, with its sources. Paged state lives in managed memory,
which is the host's to begin with: it is counted apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.config.optimizers import EXACT_BELOW, PAGED_FROM, optimizer
from memprof.foreign import Kwargs


class _Blockwise(torch.optim.Optimizer):
    """Moments in few bits; a step reads and writes in place and allocates nothing."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        moments: int,
        bits: int,
        block: int,
        full: set[int],
        paged: Callable[[int], None] | None,
        **_: Any,
    ) -> None:
        super().__init__(params, {"lr": lr})
        self._moments, self._bits, self._block, self._full, self._paged = moments, bits, block, full, paged
        self._tables: list[Any] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make state that is missing; everything else happens in place."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self._make_state(parameter)
        return None

    def _make_state(self, parameter: Any) -> None:
        count, state = parameter.numel(), self.state[parameter]
        state["step"] = 0
        if self._paged is not None and count >= PAGED_FROM:
            self._paged(self._moments * self._bytes_of(parameter))
            state["paged"] = True
            return
        exact = self._bits == 32 or count < EXACT_BELOW or id(parameter) in self._full
        widths = (2, 1) if self._moments == 3 else (1,) * self._moments  # AdEMAMix keeps two moments in one tensor
        if not exact and not self._tables:
            self._tables = [torch.empty(256, device=parameter.device) for _ in widths]
        blocks = -(-count // self._block)
        for number, width in enumerate(widths, 1):
            if exact:
                state[f"state{number}"] = parameter.new_zeros((width, *parameter.shape), dtype=torch.float32)
                continue
            length = width * -(-count * self._bits // 8)
            state[f"state{number}"] = torch.zeros(length, dtype=torch.uint8, device=parameter.device)
            state[f"absmax{number}"] = torch.zeros(width * blocks, device=parameter.device)
            state[f"qmap{number}"] = self._tables[number - 1]

    def _bytes_of(self, parameter: Any) -> int:
        count = parameter.numel()
        if self._bits == 32 or id(parameter) in self._full:
            return int(count * 4)
        return int(-(-count * self._bits // 8) + -(-count // self._block) * 4)


class _NoStep(torch.optim.Optimizer):
    """No optimizer at all: what a run needs up to the end of its backward."""

    def __init__(self, params: Any, lr: float = 0.0, **_: Any) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        """Nothing."""
        return None


def modelled_optimizer(name: str, model: Any, paged: Callable[[int], None]) -> tuple[type, Kwargs] | None:
    """Return an optimizer as class and arguments; None where torch or transformers have it themselves.

    bitsandbytes treats the model's embeddings apart. ``paged`` hears of bytes of state that live in managed memory.
    """
    if name == "none":
        return _NoStep, {}
    row = optimizer(name)
    if row.bits is None:
        return None
    full: set[int] = set()
    if row.exact_embeddings:
        full = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    keep = {"moments": row.moments, "bits": row.bits, "block": row.block, "full": full}
    return _Blockwise, {**keep, "paged": paged if row.paged else None}
