"""Keep the state that random numbers come from, and set it back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RandomState:
    """torch's random state of the host and of one CUDA device."""

    device: torch.device
    host: torch.Tensor
    on_device: torch.Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        return cls(device, torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def equals(self, other: RandomState) -> bool:
        """Tell whether nothing was drawn between the two."""
        pairs = ((self.host, other.host), (self.on_device, other.on_device))
        return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)

    def restore(self) -> None:
        """Draw from here on what was drawn after :meth:`now`."""
        torch.set_rng_state(self.host)
        if self.on_device is not None:
            torch.cuda.set_rng_state(self.on_device, self.device)

    @classmethod
    @contextmanager
    def kept(cls, device: torch.device) -> Iterator[None]:
        """Leave the state after what runs inside as it was before."""
        state = cls.now(device)
        try:
            yield
        finally:
            state.restore()
