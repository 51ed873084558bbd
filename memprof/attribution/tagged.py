"""Facts that a recorder tagged an allocation with: region, shape, dtype, operator."""

from __future__ import annotations

from collections import Counter

import numpy as np

from memprof.attribution.facts import Bools, Draft, Facts, codes_of
from memprof.vocabulary import Category, Evidence, Phase

__all__ = ["apply_tags"]

_WHOLE_NUMBERS = ("int64", "int32", "int16", "uint8", "int8", "bool")
_LOSS = codes_of(Phase.FORWARD, Phase.OLD_LOGPROBS, Phase.REFERENCE_LOGPROBS)
_MODEL_BYTES = 1 << 12


def apply_tags(facts: Facts, draft: Draft, parameters: Counter[int]) -> None:
    """Decide rows by their tag; those whose tag leaves the question open stay open."""
    if not facts.tags.present:
        return
    said = facts.tags.category[facts.timeline.metadata]
    for category in Category:
        draft.fill(said == category.code, category, Evidence.METADATA, "tag.category")
    region = {
        name: _equal(facts, "region", name)
        for name in ("forward", "no_grad", "recompute", "backward", "optimizer", "outside")
    }
    inside = region["forward"] | region["no_grad"] | region["recompute"]
    whole = np.isin(np.array(facts.tags.column("dtype")), _WHOLE_NUMBERS)[facts.timeline.metadata]
    _casts(facts, draft, inside, parameters)
    # Cached keys and values also come out of modules: in generation lifetimes decide first.
    generating = facts.phase == Phase.GENERATE.code
    fill = draft.fill
    fill(whole & ~region["optimizer"] & ~inside, Category.INPUTS, Evidence.METADATA, "tag.whole-numbers")
    fill(region["recompute"], Category.ACTIVATIONS, Evidence.METADATA, "tag.recompute", "recomputed")
    fill(inside & ~generating, Category.ACTIVATIONS, Evidence.METADATA, "tag.module-forward")
    fill(region["backward"], Category.ACTIVATION_GRADIENTS, Evidence.METADATA, "tag.backward", "scratch")
    brief = (facts.death == facts.phase) & ~facts.survivor
    fill(region["optimizer"] & brief, Category.TEMPORARIES, Evidence.METADATA, "tag.optimizer")
    fill(region["outside"] & np.isin(facts.phase, _LOSS), Category.LOSS_LOGITS, Evidence.METADATA, "tag.loss")


def _equal(facts: Facts, key: str, value: str) -> Bools:
    return np.array([v == value for v in facts.tags.column(key)], bool)[facts.timeline.metadata]


def _casts(facts: Facts, draft: Draft, inside: Bools, parameters: Counter[int]) -> None:
    """A conversion inside a module whose matrix has a parameter's extent in another dtype."""
    copies = np.array(["_to_copy" in op for op in facts.tags.column("op")], bool)[facts.timeline.metadata]
    other = np.array(sorted({s // 2 for s in parameters} | {s * 2 for s in parameters}), np.int64)
    flat = facts.tags.rank[facts.timeline.metadata] <= 2
    rows = copies & inside & flat & np.isin(facts.size, other) & (facts.size >= _MODEL_BYTES)
    draft.fill(
        rows, Category.WEIGHT_CASTS, Evidence.SHAPE, "tag.cast-of-parameter", alternatives=(Category.ACTIVATIONS,)
    )
