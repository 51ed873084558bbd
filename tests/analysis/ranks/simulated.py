"""Reports of many ranks, made up: the sample's run with sequences of other lengths, on nodes of eight."""

from __future__ import annotations

import copy
import random
from typing import Any

from memprof.analysis.ranks.merge import missing_ranks
from memprof.report.codec import plain_entries
from tests.report.plain import fullest, merged, rank_summary
from tests.reports.sample import sample

PER_NODE = 8
# What grows with the tokens of a rank's own batch.
_BY_TOKENS = ("activations", "loss_logits", "activation_gradients")


def rank_report(rank: int, world: int, factor: float = 1.0, node: str | None = None) -> dict[str, Any]:
    """The sample's report as rank ``rank`` would write it, its token-bound categories ``factor`` times as large."""
    report, _ = sample()
    report = copy.deepcopy(report)
    report["source"] |= {
        "rank": rank,
        "world_size": world,
        "node": node or f"gpu-{rank // PER_NODE:03d}",
        "device": rank % 8,
    }
    report["source"]["files"] = [f"runs/step-000002.rank-{rank}.pickle"]
    grown = _grow(report["peak"]["categories"], factor)
    for name in ("allocated_bytes", "active_bytes", "reserved_bytes", "requested_bytes"):
        report["peak"][name] += grown
    report["device_peak"]["reserved_bytes"] += max(grown, 0)
    _grow(report["own_peaks"], factor)
    for phase in report["phases"]:
        phase["peak_bytes"] += _grow(phase["categories"], factor)
    step = report["peak"]["step"]
    report["growth"] = {
        "steps": [{"step": step, "peak_bytes": 1, "end_bytes": 1, "tokens": round(8000 * factor)}],
        "end_bytes_per_step": None,
        "peak_bytes_per_token": None,
        "explained_by_tokens": None,
        "left_behind": [],
    }
    return report


def _grow(categories: dict[str, int], factor: float) -> int:
    """Stretch what depends on tokens; the bytes that came to it."""
    before = sum(categories.values())
    for category in _BY_TOKENS:
        if category in categories:
            categories[category] = round(categories[category] * factor)
    return sum(categories.values()) - before


def many_ranks(world: int, missing: tuple[int, ...] = (), seed: int = 0) -> dict[str, Any]:
    """A merged report of ``world`` ranks whose batches differ by up to a fifth."""
    chance = random.Random(seed)
    factors = {rank: 1 + chance.uniform(-0.2, 0.2) for rank in range(world)}
    summaries = []
    for rank in range(world):
        if rank not in missing:
            factor = factors[rank]
            if not summaries:
                summaries.append(rank_summary(rank_report(rank, world, factor)))
            else:  # the same figures without building the whole sample each time
                summaries.append(_like(summaries[0], rank, factor / factors[0]))
    shown = fullest(summaries)
    report = rank_report(shown, world, factors[shown])
    missing_rows = plain_entries(missing_ranks([s["rank"] for s in summaries], world))
    return merged(report, summaries, world, missing_rows)


def _like(summary: dict[str, Any], rank: int, factor: float) -> dict[str, Any]:
    new = copy.deepcopy(summary)
    new |= {"rank": rank, "node": f"gpu-{rank // PER_NODE:03d}", "file": f"runs/step-000002.rank-{rank}.pickle"}
    grown = _grow(new["peak"]["categories"], factor)
    new["peak"]["active_bytes"] += grown
    new["peak"]["allocated_bytes"] += grown
    new["device_peak"]["reserved_bytes"] += max(grown, 0)
    new["tokens"] = round(summary["tokens"] * factor)
    for phase in new["phases"]:
        phase["peak_bytes"] += _grow(phase["categories"], factor)
    return new
