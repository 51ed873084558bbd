"""Count the blocks that an analysis has at its peak, for a comparison of runs."""

from __future__ import annotations

import numpy as np

from memprof.analysis.allocations.differences import Holdings, Key, stack_key
from memprof.analysis.analysis import Analysis
from memprof.vocabulary import Category

_CATEGORIES = list(Category)


def holdings_of_analysis(analysis: Analysis) -> Holdings:
    """Return every block alive at the allocated peak of an analysed snapshot."""
    line = analysis.timeline
    rows = line.alive_at(analysis.peak.instant)
    kinds, first, counts = np.unique(
        np.stack([column[rows].astype(np.int64) for column in (line.stack, line.size, analysis.attribution.category)]),
        axis=1,
        return_index=True,
        return_counts=True,
    )
    keys: dict[int, tuple[str, ...]] = {}
    held: dict[Key, int] = {}
    examples: dict[Key, int] = {}
    for (stack, size, code), row, count in zip(kinds.T.tolist(), rows[first].tolist(), counts.tolist(), strict=True):
        if stack not in keys:
            keys[stack] = stack_key(analysis.stacks.of(stack))
        key = (keys[stack], size, _CATEGORIES[code])
        held[key] = held.get(key, 0) + count
        examples.setdefault(key, row)
    return Holdings(held, examples, analysis.allocation, 0)
