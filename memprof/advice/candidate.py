"""Define a change that advice may name: what to do, what to paste, what it costs, what it would save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memprof.advice.recorded_run import Effect
from memprof.config.to_trl_config import written


class Toll:
    """Rank what a change costs the user, least first: combinations take the cheaper change."""

    NOTHING = 0
    SLOWER = 1
    NEEDS = 2  # a package, host memory, another GPU
    ROUNDED = 3  # the same training in coarser numbers
    TRAINED = 4  # fewer parameters are trained
    OBJECTIVE = 5  # other data, or another objective


@dataclass(frozen=True)
class Candidate:
    """A change worth considering.

    Args:
        id: what combinations and tests call it.
        action: what to do, as a sentence without its full stop.
        costs: what it costs, with the reason.
        exact: whether gradients stay the same (to rounding, where sums are only taken in another order).
        toll: how much it asks of the user.
        changes: settings of the changed run; empty where it cannot be simulated.
        setting: what to paste; default: the changes as they are written for the trainer.
        effect: the estimate; None where only a simulation can tell.
        device: the change is about what the device holds, not about what the program allocates.
    """

    id: str
    action: str
    costs: str
    exact: bool
    toll: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    setting: str = ""
    effect: Effect | None = None
    device: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "setting", self.setting or written(self.changes))

    def entry(self, saves_bytes: int, basis: str) -> dict[str, Any]:
        """Return the change as it stands in a report's ``advice``."""
        return {
            "id": self.id,
            "action": self.action,
            "setting": self.setting,
            "saves_bytes": saves_bytes,
            "costs": self.costs,
            "exact": self.exact,
            "toll": self.toll,
            "basis": basis,
            "peak": "device" if self.device else "allocated",
        }
