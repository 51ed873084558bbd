"""The ranks of one run as the document holds them: frozen, plain, in bytes, every string one harmless line."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Cell", "NodeRow", "PhaseSpread", "RankRow", "Ranks"]


@dataclass(frozen=True)
class Cell:
    """One rank's bytes of one category.

    ``heat`` runs from 0 (nothing) to 8 (the most any rank holds of anything), ``shade`` from 1 (the lowest rank)
    to 8 (the highest) where the category's spread is worth showing, and is 0 elsewhere; ``above`` says that it stands
    clearly above the median rank's.
    """

    bytes: int
    heat: int
    shade: int
    above: bool


@dataclass(frozen=True)
class RankRow:
    """One rank at its own peak. ``cells`` follow the columns; ``held_bytes`` is what its device held, where known."""

    rank: int
    node: str
    where: str
    peak_bytes: int
    held_bytes: int | None
    oom: bool
    shown: bool
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class PhaseSpread:
    """One phase over the ranks, each at its highest in it."""

    phase: str
    label: str
    highest_rank: int
    highest_bytes: int
    median_bytes: int
    lowest_bytes: int
    lowest_rank: int
    imbalance: float


@dataclass(frozen=True)
class NodeRow:
    """One machine: its ranks, the fullest of them, and what all of them hold."""

    node: str
    ranks: str
    count: int
    highest_rank: int
    highest_bytes: int
    mean_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Ranks:
    """Everything shown of the ranks beside the one that the document is about.

    ``columns`` are ``(category id, label)``, the last with the id "" for all that is nowhere worth a column of its own;
    ``rows`` and ``nodes`` stand fullest first, a rank that ran out of memory before all.
    """

    sentence: str
    missing: str
    differences: tuple[str, ...]
    count: int
    world_size: int
    columns: tuple[tuple[str, str], ...]
    rows: tuple[RankRow, ...]
    phases: tuple[PhaseSpread, ...]
    nodes: tuple[NodeRow, ...]
    median_bytes: int
    lowest_bytes: int
    total_bytes: int
    imbalance: float
