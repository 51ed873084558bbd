"""Keep the ranks of a run together where each forward talks to the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from memprof.grpo.rows import Row


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a run. ``forward_together``: a forward talks to other ranks, because weights are sharded."""

    accelerator: Any
    forward_together: bool

    @classmethod
    def of(cls, accelerator: Any, model: Any) -> RankGroup:
        """Find out how ``model`` is spread: sharded by accelerate, or by transformers while it was loaded."""
        if accelerator.num_processes == 1:
            return cls(accelerator, False)
        kind = str(getattr(accelerator.distributed_type, "value", "NO")).upper()
        sharded = any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
        return cls(accelerator, sharded or kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "TP"))

    def same_count(self, pieces: list[list[Row]]) -> list[list[Row]]:
        """Add empty pieces until this rank has as many as the rank with the most, where forwards run together.

        Under DDP ranks meet in the last piece's backward only, so their counts may differ.
        """
        if not self.forward_together:
            return pieces
        count = torch.tensor([len(pieces)], device=self.accelerator.device)
        most = int(self.accelerator.gather(count).max())
        return pieces + [[] for _ in range(most - len(pieces))]

    def any(self, found: bool) -> bool:
        """Tell whether ``found`` is true on any rank."""
        if self.accelerator.num_processes == 1:
            return found
        return bool(self.accelerator.gather(torch.tensor([int(found)], device=self.accelerator.device)).max())

    def least(self, size: int) -> int:
        """Return the smallest ``size`` of all ranks, where forwards run together; else ``size``."""
        if not self.forward_together:
            return size
        return int(self.accelerator.gather(torch.tensor([size], device=self.accelerator.device)).min())
