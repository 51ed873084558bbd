"""Checkpointing as advice, in the words that TRL's trainer and the lean one share."""

from __future__ import annotations

from memprof.advice import effects
from memprof.advice.recorded_run import Candidate, Effect, Toll

__all__ = ["checkpoint", "offload"]


def checkpoint(setting: str, kind: bool | str) -> Candidate:
    """Turn it on: ``setting`` is what to paste, ``kind`` what is simulated."""
    return Candidate(
        id="checkpointing",
        action="Turn gradient checkpointing on",
        setting=setting,
        costs="Every layer's forward runs once more in backward: 20 to 30 % longer training passes, "
        "generation as before.",
        exact=True,
        toll=Toll.SLOWER,
        changes={"gradient_checkpointing": kind},
        effect=effects.checkpointed,
    )


def offload(setting: str, effect: Effect | None = None, *, more_costs: str = "") -> Candidate:
    """Keep the checkpoints on the host."""
    return Candidate(
        id="offloaded_checkpoints",
        action="Keep each layer's input in pinned host memory until backward needs it",
        setting=setting,
        costs="Copies each layer's input to the host and back: little beside long sequences' work, much beside "
        "short ones'; host memory is taken in powers of two." + more_costs,
        exact=True,
        toll=Toll.NEEDS,
        changes={"gradient_checkpointing": "offloaded"},
        effect=effect,
    )
