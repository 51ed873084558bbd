"""DistributedDataParallel's gradient buckets: made in C++, never a Python tensor, but their sizes are stated."""

from __future__ import annotations

from collections import Counter

import numpy as np

from memprof.attribution.facts import Draft, Facts
from memprof.vocabulary import Category, Evidence

__all__ = ["apply_buckets"]

RULE = "recorded.bucket-size"
_BLOCK = 512


def apply_buckets(facts: Facts, draft: Draft) -> None:
    """Open rows of exactly a bucket's size that live to the end, as many as there are buckets of that size.

    The buckets that alias ``.grad`` have an owner, and none of them is stated.
    """
    stated = Counter(n for n in facts.snapshot.extra.get("buckets") or [] if n > 0)
    t = facts.timeline
    for size, count in stated.items():
        # A trace's sizes are what was asked for, or blocks.
        alike = np.isin(facts.size, (size, -(-size // _BLOCK) * _BLOCK))
        rows = np.flatnonzero(alike & facts.survivor & draft.open)
        # A tensor trace meets a bucket in the first backward that fills it; of several the oldest are the buckets.
        rows = rows[np.argsort(t.alloc_event[rows], kind="stable")][:count]
        draft.fill(
            rows,
            Category.COMMUNICATION,
            Evidence.FINGERPRINT,
            RULE,
            "bucket",
            alternatives=(Category.ACTIVATION_GRADIENTS,),
        )
