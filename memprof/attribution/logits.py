"""The [tokens, vocabulary] rule: logits, their tiles and gradients, known by extent.

The vocabulary comes from the recorded configuration, from shape tags, or from the parameters' sizes
(embedding divided by a norm). A block whose size is a whole number of vocabulary rows counts only where
logits can be: outside modules while sampling or computing a loss, at a model's head, in backward with a
size seen before. The hidden size is excluded: embeddings, their gradients and casts are no logits.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from memprof.attribution.facts import Bools, Draft, Facts, codes_of
from memprof.attribution.models import embedding_geometry
from memprof.vocabulary import Category, Evidence, Phase

__all__ = ["apply_logits", "find_vocabulary"]

RULE = "logits.vocabulary-extent"
_RARE = 100  # an odd part this large makes divisibility by the vocabulary no accident
_DETAIL = {
    Phase.GENERATE.code: "sampling", Phase.OLD_LOGPROBS.code: "old", Phase.REFERENCE_LOGPROBS.code: "reference",
    Phase.FORWARD.code: "policy", Phase.BACKWARD.code: "policy",
}  # fmt: skip
_WHERE = codes_of(
    Phase.GENERATE, Phase.OLD_LOGPROBS, Phase.REFERENCE_LOGPROBS, Phase.FORWARD, Phase.EVALUATE, Phase.REWARD
)


def find_vocabulary(facts: Facts, parameters: Counter[int]) -> tuple[int, int]:
    """(vocabulary, bytes of a hidden vector), 0 where unknown."""
    vocabulary, vector = embedding_geometry(parameters)
    config: dict[str, Any] = facts.snapshot.extra.get("config") or {}
    for key in ("vocab_size", "vocab", "model.vocab_size", "vocabulary"):
        if isinstance(config.get(key), int) and config[key] > 1:
            return int(config[key]), vector
    return vocabulary, vector


def apply_logits(facts: Facts, draft: Draft, parameters: Counter[int], vocabulary: int) -> None:
    """Decide rows with a vocabulary extent. ``parameters`` are sizes that are no logits."""
    if vocabulary < 2:
        return
    wide = _wide_by_tag(facts, vocabulary) | (_wide_by_size(facts, parameters, vocabulary) & (facts.tags.rank[facts.timeline.metadata] == 0))
    place = np.isin(facts.phase, _WHERE)
    outside = place & ~facts.module
    head = place & facts.module & (facts.module_depth <= _head_depth(facts)) & _rare_or_tagged(facts, vocabulary)
    forward = wide & (outside | head) & draft.open
    known = np.unique(facts.size[forward & (facts.size >= vocabulary * 16)])
    related = np.unique(np.concatenate([known, known * 2, known // 2]))
    backward = (facts.phase == Phase.BACKWARD.code) & np.isin(facts.size, related) & _not_parameters(facts, parameters)
    backward |= (facts.phase == Phase.BACKWARD.code) & _wide_by_tag(facts, vocabulary)
    for phase in np.unique(facts.phase[forward | backward]):
        rows = (forward | backward) & (facts.phase == phase)
        draft.fill(rows, Category.LOSS_LOGITS, Evidence.SHAPE, RULE, _DETAIL.get(int(phase), ""))


def _wide_by_tag(facts: Facts, vocabulary: int) -> Bools:
    """A recorded shape [.., vocabulary] of at least two extents.

    Gradients of embeddings are [vocabulary, hidden]: the last extent tells them apart.
    """
    hits = (facts.tags.last_extent == vocabulary) & (facts.tags.rank >= 2)
    return hits[facts.timeline.metadata]


def _wide_by_size(facts: Facts, parameters: Counter[int], vocabulary: int) -> Bools:
    whole = (facts.size % (2 * vocabulary) == 0) & (facts.size >= 2 * vocabulary)
    return whole & _not_parameters(facts, parameters)


def _not_parameters(facts: Facts, parameters: Counter[int]) -> Bools:
    sizes = np.array(sorted(parameters), np.int64)
    return ~np.isin(facts.size, np.concatenate([sizes, sizes * 2, sizes // 2]))


def _rare_or_tagged(facts: Facts, vocabulary: int) -> Bools:
    odd = vocabulary
    while odd % 2 == 0:
        odd //= 2
    if odd >= _RARE:
        return np.ones(len(facts.size), bool)
    # Common divisors: only blocks that hold a fair number of whole rows, larger than activations around them.
    tagged = facts.tags.rank[facts.timeline.metadata] > 0
    usual = np.median(facts.size[facts.module & (facts.size > 4096)]) if facts.module.any() else 0
    return tagged | (facts.linear & (facts.size >= 4 * usual))


def _head_depth(facts: Facts) -> int:
    """Module depth of the head: the shallowest product with a parameter under a model's forward."""
    rows = facts.linear & facts.module & (facts.module_depth > 0)
    return int(facts.module_depth[rows].min()) if rows.any() else 0
