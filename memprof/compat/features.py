"""Name the features that use other packages' private names, and what each is checked against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memprof.compat.versions import EXECUTING, WATCHING, Range


@dataclass(frozen=True)
class Feature:
    """Something a user enters: its ``title`` is the subject of its refusal, "The lean trainer".

    ``tested``: packages it needs and their versions. ``includes``: features whose targets are its targets too.
    ``imports``: whether checking may import packages. What watches a run looks only at what the run has imported.
    """

    title: str
    tested: Mapping[str, Range]
    includes: tuple[str, ...] = ()
    imports: bool = True


_TORCH = {"torch": WATCHING["torch"]}

FEATURES: dict[str, Feature] = {
    "lean": Feature("The lean trainer", EXECUTING),
    "lean.rloo": Feature("The lean RLOO trainer", EXECUTING, ("lean",)),
    "lean.moe": Feature("A router's auxiliary loss in chunks", EXECUTING),
    "simulate.world": Feature("The simulator", {"torch": EXECUTING["torch"]}),  # any loop, not only TRL's
    "simulate": Feature("The simulator", EXECUTING, ("simulate.world",)),
    "simulate.lean": Feature("The simulator of the lean trainer", EXECUTING, ("simulate", "lean")),
    "simulate.rloo": Feature("The simulator of RLOO", EXECUTING, ("simulate",)),
    "simulate.fsdp2": Feature("The simulator of FSDP2", EXECUTING, ("simulate",)),
    "simulate.tp": Feature("The simulator of tensor parallelism", EXECUTING, ("simulate",)),
    "simulate.zero": Feature("The simulator of ZeRO", EXECUTING, ("simulate",)),
    "simulate.selective": Feature("The simulator of selective checkpointing", EXECUTING, ("simulate",)),
    "simulate.offloaded": Feature("The simulator of offloaded checkpointing", EXECUTING, ("simulate",)),
    "simulate.liger": Feature("The simulator of Liger's loss", EXECUTING, ("simulate",)),
    "plan": Feature("memprof plan", EXECUTING, ("simulate",)),
    "budget": Feature("memory_budget", EXECUTING, ("lean", "simulate")),
    "script": Feature("memprof simulate --script", EXECUTING, ("simulate", "simulate.offloaded", "simulate.rloo")),
    "callback": Feature("The callback", WATCHING, imports=False),
    "rehearse": Feature("The rehearsal", WATCHING, ("callback",), imports=False),
    "run": Feature("memprof run", WATCHING, imports=False),
    "attach": Feature("memprof.attach", _TORCH, imports=False),
    "record.cuda": Feature("The CUDA recorder", _TORCH, imports=False),
    "record.trace": Feature("CPU recording", _TORCH, imports=False),
}


def targets_for(feature: str) -> frozenset[str]:
    """Return the feature's name and those of all it includes."""
    found = {feature}
    for other in FEATURES[feature].includes:
        found |= targets_for(other)
    return frozenset(found)
