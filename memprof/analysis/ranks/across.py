"""Compare ranks: which one holds most, by how much, in which phase and category, and on which node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median_low
from typing import Any

from memprof.vocabulary import Category, Phase

Summary = Mapping[str, Any]

# Differences below this share of the median rank's peak are left out.
_WORTH = 0.01
_MOST_CATEGORIES = 3
# What grows with the tokens of a rank's own batch.
_BY_TOKENS = {"activations", "activation_gradients", "loss_logits"}


def across(
    ranks: Sequence[Summary], world_size: int | None, missing: Iterable[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Compare the ranks' summaries (``across_ranks`` of ``memprof.report/1``); sizes in bytes.

    Figures are *active* bytes, each rank at its own peak, so that categories add up. The device's figures (reserved
    bytes and those outside torch) are apart. The median is one of the ranks' own values, the lower of two middle ones.

    Args:
        ranks: the summary of each rank (:func:`memprof.analysis.ranks.summary.rank_summary`), at least one.
        missing: ``{"rank", "last_step", "peak_allocated_bytes"}`` of each rank without a recording.
    """
    steps = {r["peak"]["step"] for r in ranks}
    return {
        "world_size": world_size,
        "missing": [dict(m) for m in missing],
        "steps": sorted(s for s in steps if s is not None),
        "peak": _spread(ranks, lambda r: r["peak"]["active_bytes"]),
        "device_peak": _spread(ranks, _held),
        "categories": _categories(ranks),
        "phases": _phases(ranks),
        "nodes": _nodes(ranks),
        "differences": _differences(ranks),
    }


def _held(summary: Summary) -> int | None:
    """Return a rank's bytes at its device peak: reserved plus, where measured, memory outside torch."""
    peak = summary["device_peak"]
    return None if peak["reserved_bytes"] is None else peak["reserved_bytes"] + (peak["non_torch_bytes"] or 0)


def _spread(ranks: Sequence[Summary], of: Callable[[Summary], int | None]) -> dict[str, Any] | None:
    """Return the highest, lowest, median and mean of a figure, with their ranks; None where no rank knows it."""
    known = [(n, r["rank"]) for r in ranks if (n := of(r)) is not None]
    if not known:
        return None
    # Among equal ranks the one with the lowest number is named.
    highest = max(known, key=lambda k: (k[0], -k[1]))
    lowest = min(known)
    total = sum(n for n, _ in known)
    mean = total / len(known)
    return {
        "highest_rank": highest[1],
        "highest_bytes": highest[0],
        "lowest_rank": lowest[1],
        "lowest_bytes": lowest[0],
        "median_bytes": median_low(n for n, _ in known),
        "mean_bytes": round(mean),
        "total_bytes": total,
        # How far the fullest rank lies above the mean: 0 where all are equal.
        "imbalance": highest[0] / mean - 1 if mean else 0.0,
    }


def _of(category: str) -> Callable[[Summary], int]:
    return lambda r: int(r["peak"]["categories"].get(category, 0))


def _categories(ranks: Sequence[Summary]) -> list[dict[str, Any]]:
    rows = []
    for category in Category:
        spread = _spread(ranks, _of(category.value))
        if spread is not None and spread["highest_bytes"]:
            rows.append({"category": category.value, **spread})
    return rows


def _peak_in(phase: str) -> Callable[[Summary], int | None]:
    return lambda r: next((p["peak_bytes"] for p in r["phases"] if p["phase"] == phase), None)


def _phases(ranks: Sequence[Summary]) -> list[dict[str, Any]]:
    rows = []
    for phase in Phase:
        spread = _spread(ranks, _peak_in(phase.value))
        if spread is not None:
            rows.append({"phase": phase.value, **spread})
    return rows


def _nodes(ranks: Sequence[Summary]) -> list[dict[str, Any]]:
    by_node: dict[str | None, list[Summary]] = {}
    for summary in ranks:
        by_node.setdefault(summary.get("node"), []).append(summary)
    rows = []
    for node, members in sorted(by_node.items(), key=lambda item: min(r["rank"] for r in item[1])):
        spread = _spread(members, lambda r: r["peak"]["active_bytes"])
        rows.append({"node": node, "ranks": sorted(r["rank"] for r in members), **(spread or {})})
    return rows


def _differences(ranks: Sequence[Summary]) -> list[dict[str, Any]]:
    """List what the fullest rank, and rank 0 if it is another, hold above the median rank in the same phase."""
    if len(ranks) < 2:
        return []
    by_rank = {r["rank"]: r for r in ranks}
    fullest = max(ranks, key=lambda r: (r["peak"]["active_bytes"], -r["rank"]))
    chosen = [fullest["rank"], *([0] if fullest["rank"] != 0 and 0 in by_rank else [])]
    return [row for rank in chosen for row in _above_median(by_rank[rank], ranks)]


def _above_median(own: Summary, ranks: Sequence[Summary]) -> list[dict[str, Any]]:
    phase = own["peak"]["phase"]
    # Ranks are compared in one phase, because a rank that peaks in another phase differs in everything.
    held = {r["rank"]: _in_phase(r, phase) for r in ranks}
    known = {rank: parts for rank, parts in held.items() if parts is not None}
    mine = known.get(own["rank"])
    if mine is None or len(known) < 2:
        return []
    threshold = _WORTH * median_low(sum(parts.values()) for parts in known.values())
    tokens = [r["tokens"] for r in ranks if isinstance(r.get("tokens"), int)]
    rows = []
    for category, n in mine.items():
        usual = median_low(parts.get(category, 0) for parts in known.values())
        if n - usual > threshold:
            why = _known_reason(category, own, usual, median_low(tokens) if tokens else None)
            rows.append(_above(own["rank"], phase, category, n - usual, usual, why))
    rows.sort(key=lambda row: (-row["bytes"], row["category"]))
    return rows[:_MOST_CATEGORIES] + _outside(own, ranks, threshold)


def _above(rank: int, phase: str | None, category: str, above: int, usual: int, why: str) -> dict[str, Any]:
    return {
        "rank": rank, "phase": phase, "category": category, "bytes": above, "median_bytes": usual, "reason": why,
    }  # fmt: skip


def _in_phase(summary: Summary, phase: str | None) -> Mapping[str, int] | None:
    if phase == summary["peak"]["phase"]:
        categories: Mapping[str, int] = summary["peak"]["categories"]
        return categories
    return next((p["categories"] for p in summary["phases"] if p["phase"] == phase), None)


def _outside(own: Summary, ranks: Sequence[Summary], threshold: float) -> list[dict[str, Any]]:
    known = [n for r in ranks if (n := r["device_peak"]["non_torch_bytes"]) is not None]
    mine = own["device_peak"]["non_torch_bytes"]
    if mine is None or len(known) < 2 or mine - (usual := median_low(known)) <= threshold:
        return []
    why = _known_reason("non_torch", own, usual, None)
    return [_above(own["rank"], own["device_peak"]["phase"], "non_torch", mine - usual, usual, why)]


def _known_reason(category: str, own: Mapping[str, Any], usual: int, median_tokens: int | None) -> str:
    """Return why a rank holds more of ``category`` (or of ``"non_torch"``) than the median rank; "" if not known.

    Tokens are a reason where both ranks counted them; so is a median rank that holds none (``usual`` bytes).
    """
    tokens = own.get("tokens")
    if category in _BY_TOKENS and isinstance(tokens, int) and median_tokens:
        if tokens > median_tokens:
            return f"{tokens:,} tokens in that step where the median rank had {median_tokens:,}"
        return f"not more tokens ({tokens:,}; the median rank had {median_tokens:,})"
    return "the median rank holds none" if not usual else ""
