"""Hold the gradient that pieces used against the one of TRL's whole loss, so that a loss that couples them is seen."""

from __future__ import annotations

import torch

from memprof.grpo.rows import Place
from memprof.grpo.step.objective import Gradient

#: How far the two may be apart, over the norm of the whole's. Both are the same fp32 operations on the same values,
#: but for sums over tokens that are not there yet.
_SAME = 1e-4


class UsedGradient:
    """The loss's gradient with respect to each log-probability and entropy, as pieces used it in their backward.

    What is 0 in ``mask``, TRL's ``completion_mask`` ``[B, T]``, is no token, and has no gradient.
    """

    def __init__(self, mask: torch.Tensor) -> None:
        self._mask = mask.bool()
        self._logps = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        self._entropies: torch.Tensor | None = None

    def note(
        self, place: Place, gradient: Gradient, device: torch.device | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``gradient`` of the tokens at ``place``, on ``device``, and remember that it is used there."""
        logps, entropies = gradient.logps[place], None if gradient.entropies is None else gradient.entropies[place]
        self._logps[place] = logps
        if entropies is not None:
            if self._entropies is None:
                self._entropies = torch.zeros_like(self._logps)
            self._entropies[place] = entropies
            entropies = entropies.to(device)
        return logps.to(device), entropies

    def rest(self, whole: Gradient) -> Gradient:
        """Return what must be added to the gradient that was used, to be the ``whole`` loss's."""
        entropies = None
        if whole.entropies is not None or self._entropies is not None:
            entropies = self._rest(self._entropies, whole.entropies)
        return Gradient(self._rest(self._logps, whole.logps), entropies)

    def distance(self, whole: Gradient) -> float:
        """Measure how far the gradient that was used is from the ``whole`` loss's, over the norm of that."""
        rest = torch.stack([part.norm() for part in self.rest(whole)[:2] if part is not None]).norm()
        known = [part[self._mask].nan_to_num(nan=0.0) for part in whole[:2] if part is not None]
        size = torch.stack([part.norm() for part in known]).norm()
        return float(rest / size.clamp(min=torch.finfo(torch.float32).tiny))

    def agrees(self, whole: Gradient) -> bool:
        """Tell whether the two are the same but for rounding; NaN is the same as NaN."""
        return self.distance(whole) <= _SAME

    def _rest(self, used: torch.Tensor | None, whole: torch.Tensor | None) -> torch.Tensor:
        meant = torch.zeros_like(self._logps) if whole is None else whole
        found = torch.zeros_like(self._logps) if used is None else used
        alike = (meant == found) | (meant.isnan() & found.isnan())
        return torch.where(alike | ~self._mask, 0.0, meant - found)
