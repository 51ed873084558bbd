"""Optimizers whose packages need a GPU, modelled: what their state weighs and that their kernels work in place.

Layouts: bitsandbytes' block-wise 8-bit state (one byte a value, an fp32 scale for each block of 256, values of small
tensors and of embeddings in fp32: transformers asks for the latter), torchao's 8-bit and 4-bit state (blocks of 256
and 128). Paged state lives in managed memory, which is the host's to begin with: it is counted apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["MODELLED", "modelled_optimizer"]

_BLOCK = 256
_SMALL = 4096  # bitsandbytes keeps tensors below this in fp32
_PAGED_FROM = 100_000  # values from which bitsandbytes pages a state

# name -> (bits of a value, values in a block, embeddings in fp32, paged)
MODELLED: dict[str, tuple[int, int, bool, bool]] = {
    "adamw_8bit": (8, _BLOCK, True, False),
    "adamw_bnb_8bit": (8, _BLOCK, True, False),
    "paged_adamw_8bit": (8, _BLOCK, True, True),
    "paged_adamw_32bit": (32, _BLOCK, False, True),
    "paged_adamw": (32, _BLOCK, False, True),
    "adamw_torch_8bit": (8, _BLOCK, False, False),
    "adamw_torch_4bit": (4, 128, False, False),
}


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
        if self._paged is not None and count >= _PAGED_FROM:
            self._paged(2 * self._bytes_of(parameter))
            state["paged"] = True
            return
        exact = self._bits == 32 or count < _SMALL or id(parameter) in self._full
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
    """The optimizer ``name`` as class and arguments; None where torch or transformers have it themselves.

    Args:
        name: transformers' name for it, or ``none``.
        model: the model, whose embeddings bitsandbytes treats apart.
        paged: told of bytes of state that live in managed memory.
    """
    if name == "none":
        return _NoStep, {}
    if name not in MODELLED:
        return None
    bits, block, embeddings_exact, is_paged = MODELLED[name]
    full: set[int] = set()
    if embeddings_exact:
        full = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    return _BlockwiseAdamW, {"bits": bits, "block": block, "full": full, "paged": paged if is_paged else None}
