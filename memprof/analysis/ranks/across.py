"""Compare ranks: which one holds most, by how much, in which phase and category, and on which node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median_low

from memprof.report.base import ByCategory
from memprof.report.ranks import (
    AcrossRanks,
    CategorySpread,
    Difference,
    MissingRank,
    NodeSpread,
    PhaseSpread,
    RankSummary,
    Spread,
)
from memprof.vocabulary import Category, Phase

# Differences below this share of the median rank's peak are left out.
_WORTH = 0.01
_MOST_CATEGORIES = 3
# What grows with the tokens of a rank's own batch.
_BY_TOKENS = {Category.ACTIVATIONS, Category.ACTIVATION_GRADIENTS, Category.LOSS_LOGITS}
_NON_TORCH = "non_torch"


def across(ranks: Sequence[RankSummary], world_size: int | None, missing: Iterable[MissingRank] = ()) -> AcrossRanks:
    """Compare the ranks' summaries; sizes in bytes.

    Figures are *active* bytes, each rank at its peak, so that categories add up. The device's figures (reserved
    bytes and those outside torch) are apart. The median is one of the ranks' own values, the lower of two middle ones.

    Args:
        ranks: the summary of each rank (:func:`memprof.analysis.ranks.summary.rank_summary`), at least one.
        missing: each rank without a recording.
    """
    peak, device = _spread(ranks, lambda r: r.peak.active_bytes), _spread(ranks, _held)
    assert peak is not None, "there is at least one rank"
    return AcrossRanks(
        world_size=world_size,
        missing=tuple(missing),
        steps=tuple(sorted({r.peak.step for r in ranks if r.peak.step is not None})),
        peak=Spread(**asdict(peak)),
        device_peak=None if device is None else Spread(**asdict(device)),
        categories=tuple(_categories(ranks)),
        phases=tuple(_phases(ranks)),
        nodes=tuple(_nodes(ranks)),
        differences=tuple(_differences(ranks)),
    )


def _held(summary: RankSummary) -> int | None:
    """Return a rank's bytes at its device peak: reserved plus, where measured, memory outside torch."""
    peak = summary.device_peak
    return None if peak.reserved_bytes is None else peak.reserved_bytes + (peak.non_torch_bytes or 0)


@dataclass(frozen=True)
class _Figures:
    """Hold what every spread has (see :class:`memprof.report.ranks.Spread`)."""

    highest_rank: int
    highest_bytes: int
    lowest_rank: int
    lowest_bytes: int
    median_bytes: int
    mean_bytes: int
    total_bytes: int
    imbalance: float


def _spread(ranks: Sequence[RankSummary], of: Callable[[RankSummary], int | None]) -> _Figures | None:
    """Return the highest, lowest, median and mean of a figure, with their ranks; None where no rank knows it."""
    known = [(n, r.rank) for r in ranks if (n := of(r)) is not None]
    if not known:
        return None
    # Among equal ranks the one with the lowest number is named.
    highest = max(known, key=lambda k: (k[0], -k[1]))
    lowest = min(known)
    total = sum(n for n, _ in known)
    mean = total / len(known)
    return _Figures(
        highest_rank=highest[1],
        highest_bytes=highest[0],
        lowest_rank=lowest[1],
        lowest_bytes=lowest[0],
        median_bytes=median_low(n for n, _ in known),
        mean_bytes=round(mean),
        total_bytes=total,
        # How far the fullest rank lies above the mean: 0 where all are equal.
        imbalance=highest[0] / mean - 1 if mean else 0.0,
    )


def _of(category: Category) -> Callable[[RankSummary], int]:
    return lambda r: r.peak.categories.get(category, 0)


def _categories(ranks: Sequence[RankSummary]) -> list[CategorySpread]:
    spreads = ((category, _spread(ranks, _of(category))) for category in Category)
    return [
        CategorySpread(category=category, **asdict(spread))
        for category, spread in spreads
        if spread is not None and spread.highest_bytes
    ]


def _peak_in(phase: Phase) -> Callable[[RankSummary], int | None]:
    return lambda r: next((p.peak_bytes for p in r.phases if p.phase == phase), None)


def _phases(ranks: Sequence[RankSummary]) -> list[PhaseSpread]:
    spreads = ((phase, _spread(ranks, _peak_in(phase))) for phase in Phase)
    return [PhaseSpread(phase=phase, **asdict(spread)) for phase, spread in spreads if spread is not None]


def _nodes(ranks: Sequence[RankSummary]) -> list[NodeSpread]:
    by_node: dict[str | None, list[RankSummary]] = {}
    for summary in ranks:
        by_node.setdefault(summary.node, []).append(summary)
    rows = []
    for node, members in sorted(by_node.items(), key=lambda item: min(r.rank for r in item[1])):
        spread = _spread(members, lambda r: r.peak.active_bytes)
        assert spread is not None, "every rank knows its peak"
        rows.append(NodeSpread(node=node, ranks=tuple(sorted(r.rank for r in members)), **asdict(spread)))
    return rows


def _differences(ranks: Sequence[RankSummary]) -> list[Difference]:
    """List what the fullest rank, and rank 0 if it is another, hold above the median rank in the same phase."""
    if len(ranks) < 2:
        return []
    by_rank = {r.rank: r for r in ranks}
    fullest = max(ranks, key=lambda r: (r.peak.active_bytes, -r.rank))
    chosen = [fullest.rank, *([0] if fullest.rank != 0 and 0 in by_rank else [])]
    return [row for rank in chosen for row in _above_median(by_rank[rank], ranks)]


def _above_median(own: RankSummary, ranks: Sequence[RankSummary]) -> list[Difference]:
    phase = own.peak.phase
    # Ranks are compared in one phase, because a rank that peaks in another phase differs in everything.
    held = {r.rank: _in_phase(r, phase) for r in ranks}
    known = {rank: parts for rank, parts in held.items() if parts is not None}
    mine = known.get(own.rank)
    if mine is None or len(known) < 2:
        return []
    threshold = _WORTH * median_low(sum(parts.values()) for parts in known.values())
    tokens = [r.tokens for r in ranks if r.tokens is not None]
    rows = []
    for category, n in mine.items():
        usual = median_low(parts.get(category, 0) for parts in known.values())
        if n - usual > threshold:
            why = _known_reason(category, own, usual, median_low(tokens) if tokens else None)
            rows.append(_above(own, phase, category, n - usual, usual, why))
    rows.sort(key=lambda row: (-row.bytes, row.category))
    return rows[:_MOST_CATEGORIES] + _outside(own, ranks, threshold)


def _above(own: RankSummary, phase: Phase | None, category: str, above: int, usual: int, why: str) -> Difference:
    return Difference(rank=own.rank, phase=phase, category=category, bytes=above, median_bytes=usual, reason=why)


def _in_phase(summary: RankSummary, phase: Phase | None) -> ByCategory | None:
    if phase == summary.peak.phase:
        return summary.peak.categories
    return next((p.categories for p in summary.phases if p.phase == phase), None)


def _outside(own: RankSummary, ranks: Sequence[RankSummary], threshold: float) -> list[Difference]:
    known = [n for r in ranks if (n := r.device_peak.non_torch_bytes) is not None]
    mine = own.device_peak.non_torch_bytes
    if mine is None or len(known) < 2 or mine - (usual := median_low(known)) <= threshold:
        return []
    why = _known_reason(_NON_TORCH, own, usual, None)
    return [_above(own, own.device_peak.phase, _NON_TORCH, mine - usual, usual, why)]


def _known_reason(category: str, own: RankSummary, usual: int, median_tokens: int | None) -> str:
    """Return why a rank holds more of ``category`` (or of ``"non_torch"``) than the median rank; "" if not known.

    Tokens are a reason where both ranks counted them; so is a median rank that holds none (``usual`` bytes).
    """
    if category in _BY_TOKENS and own.tokens is not None and median_tokens:
        if own.tokens > median_tokens:
            return f"{own.tokens:,} tokens in that step where the median rank had {median_tokens:,}"
        return f"not more tokens ({own.tokens:,}; the median rank had {median_tokens:,})"
    return "the median rank has none" if not usual else ""
