"""Define a change that advice may name: what to do, what to paste, what it costs, what it would save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from memprof.advice.recorded_run import Effect
from memprof.files import read_toml
from memprof.oom.facts import FailureFacts
from memprof.oom.wording import fill
from memprof.report.advice import Advice

# The settings as they are written for the trainer; empty where none is changed.
_PLAIN = "{written|}"


class CostRank:
    """Rank what a change costs the user, least first: combinations take the cheaper change."""

    NOTHING = 0
    SLOWER = 1
    NEEDS = 2  # a package, host memory, another GPU
    ROUNDED = 3  # the same training in coarser numbers
    TRAINED = 4  # fewer parameters are trained
    OBJECTIVE = 5  # other data, or another objective


class ChangeTexts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of ``changes.toml``, whose head explains the fields."""

    action: str
    costs: str
    exact: bool
    cost_rank: Literal["NOTHING", "SLOWER", "NEEDS", "ROUNDED", "TRAINED", "OBJECTIVE"]
    setting: str = _PLAIN
    device: bool = False


@dataclass(frozen=True)
class Candidate:
    """A change worth considering.

    Args:
        id: what combinations and tests call it.
        action: what to do, as a sentence without its full stop.
        costs: what it costs, with the reason.
        exact: whether gradients stay the same (to rounding, where sums are only taken in another order).
        cost_rank: what it costs the user, see :class:`CostRank`; `toll` in a report's JSON.
        changes: settings of the changed run; empty where it cannot be simulated.
        setting: what to paste.
        effect: the estimate; None where only a simulation can tell.
        device: the change is about what the device holds, not about what the program allocates.
    """

    id: str
    action: str
    costs: str
    exact: bool
    cost_rank: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    setting: str = ""
    effect: Effect | None = None
    device: bool = False

    def advice(self, saves_bytes: int, basis: Literal["simulated", "estimated"]) -> Advice:
        """Return the change as it stands in a report's ``advice``."""
        return Advice(
            id=self.id,
            action=self.action,
            setting=self.setting,
            saves_bytes=saves_bytes,
            costs=self.costs,
            exact=self.exact,
            toll=self.cost_rank,
            basis=basis,
            peak="device" if self.device else "allocated",
        )


def proposed(
    name: str, changes: Mapping[str, Any] | None = None, effect: Effect | None = None, *, id: str = "", **words: Any
) -> Candidate:
    """Return a change in the words of ``changes.toml``.

    Args:
        name: its row.
        changes, effect: as of :class:`Candidate`.
        id: where one row stands for several changes; default: ``name``.
        words: what the row's names stand for.
    """
    row, changes = change_texts()[name], changes or {}
    facts = FailureFacts({**words, "written": _written(changes)})
    action, costs, setting = (_filled(text, facts) for text in (row.action, row.costs, row.setting))
    rank = getattr(CostRank, row.cost_rank)
    return Candidate(id or name, action, costs, row.exact, rank, changes, setting, effect, row.device)


def _written(changes: Mapping[str, Any]) -> str:
    """Write changed settings for the trainer; without any, what knows the trainer's names is not loaded."""
    if not changes:
        return ""
    from memprof.config.to_trl_config import written

    return written(changes)


def _filled(text: str, facts: FailureFacts) -> str:
    found = fill(text, facts)
    assert found is not None, f"{text!r} names something that is not known"
    return found


@cache
def change_texts() -> dict[str, ChangeTexts]:
    """Return the rows of ``changes.toml`` by name."""
    return msgspec.convert(read_toml(Path(__file__).with_name("changes.toml")), dict[str, ChangeTexts])
