"""Define the columns that attribution adds to a timeline."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memprof.snapshot.model import I32, U8


@dataclass(frozen=True)
class PhaseSpan:
    """Hold one stretch of one phase, in events ``[start_event, end_event)`` and microseconds.

    ``within`` names the phase it is nested in where that matters (``evaluate``, ``rehearsal``).
    """

    phase: str
    step: int | None
    start_event: int
    end_event: int
    start_us: int
    end_us: int
    within: str | None = None


@dataclass(frozen=True)
class PhaseTrack:
    """Hold the phase at every event. ``phase`` holds ``Phase`` codes; ``step`` is -1 where unknown.

    ``source`` tells where phases come from: ``marks`` (recorded), ``stacks`` (inferred) or ``none``.
    """

    phase: U8
    step: I32
    spans: list[PhaseSpan]
    source: str


@dataclass(frozen=True)
class Attribution:
    """Hold columns beside a timeline's rows, one entry per row.

    ``category`` and ``evidence`` are codes of their enums. ``detail``, ``rule``, ``name`` and
    ``alternatives`` index the tables of the same name below; 0 means "nothing" in each.
    ``phase`` and ``step`` are those of the row's birth (``Phase.LOAD`` for rows older than the trace).
    ``retained`` flags rows that outlive the step or phase that made them.
    """

    category: U8
    detail: I32
    evidence: U8
    rule: I32
    name: I32
    alternatives: I32
    phase: U8
    step: I32
    retained: NDArray[np.bool_]
    track: PhaseTrack
    details: list[str] = field(default_factory=lambda: [""])
    rules: list[str] = field(default_factory=lambda: [""])
    names: list[str] = field(default_factory=lambda: [""])
    alternative_sets: list[tuple[str, ...]] = field(default_factory=lambda: [()])
    notes: list[str] = field(default_factory=list)
