"""Stand in for optimizers whose packages need a GPU: their state is made, their kernels work in place.

What the state weighs is in :mod:`memprof.config.optimizers`, with its sources. Paged state lives in managed memory,
which is the host's to begin with: it is counted apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.config.optimizers import EXACT_BELOW, PAGED_FROM, optimizer


class _BlockwiseAdamW(torch.optim.Optimizer):
    """Two moments in few bits; a step reads and writes in place and allocates nothing."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        bits: int,
        block: int,
        full: set[int],
        paged: Callable[[int], None] | None,
        **_: Any,
    ) -> None:
        super().__init__(params, {"lr": lr})
        self._bits, self._block, self._full, self._paged = bits, block, full, paged
        self._tables: tuple[Any, Any] | None = None

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
            self._paged(2 * self._bytes_of(parameter))
            state["paged"] = True
            return
        exact = self._bits == 32 or count < EXACT_BELOW or id(parameter) in self._full
        if exact:
            state["state1"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["state2"] = torch.zeros_like(parameter, dtype=torch.float32)
            return
        if self._tables is None:
            self._tables = (torch.empty(256, device=parameter.device), torch.empty(256, device=parameter.device))
        blocks = -(-count // self._block)
        for name, table in zip(("1", "2"), self._tables, strict=True):
            state[f"state{name}"] = torch.zeros(-(-count * self._bits // 8), dtype=torch.uint8, device=parameter.device)
            state[f"absmax{name}"] = torch.zeros(blocks, device=parameter.device)
            state[f"qmap{name}"] = table

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


def modelled_optimizer(name: str, model: Any, paged: Callable[[int], None]) -> tuple[type, dict[str, Any]] | None:
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
    keep = {"bits": row.bits, "block": row.block, "full": full, "paged": paged if row.paged else None}
    return _BlockwiseAdamW, keep
