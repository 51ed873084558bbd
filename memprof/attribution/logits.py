"""Decide logits, their tiles and gradients by the [tokens, vocabulary] rule, from their size.

The vocabulary comes from the recorded configuration, from shape tags, or from the parameters' sizes
(embedding divided by a norm). A block whose size is a whole number of vocabulary rows counts only where
logits can be: outside modules while sampling or computing a loss, at a model's head, or in backward with a
size seen before. Multiples of the hidden size are excluded, because embeddings, their gradients and casts
are no logits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter

import numpy as np

from memprof.attribution.facts import AllocationFacts, Bools, Draft, Ints, codes_of
from memprof.attribution.loaded_models import embedding_geometry
from memprof.snapshot.model import distinct, is_among
from memprof.vocabulary import Category, Evidence, Phase

RULE = "logits.vocabulary-extent"
_RARE = 100  # with an odd factor this large, divisibility by the vocabulary is no accident
_DETAIL = {
    Phase.GENERATE.code: "sampling", Phase.OLD_LOGPROBS.code: "old", Phase.REFERENCE_LOGPROBS.code: "reference",
    Phase.FORWARD.code: "policy", Phase.BACKWARD.code: "policy",
}  # fmt: skip
_WHERE = codes_of(
    Phase.GENERATE, Phase.OLD_LOGPROBS, Phase.REFERENCE_LOGPROBS, Phase.FORWARD, Phase.EVALUATE, Phase.REWARD
)


def find_vocabulary(facts: AllocationFacts, parameters: Counter[int]) -> tuple[int, int]:
    """Find (vocabulary, bytes of a hidden vector); 0 where unknown."""
    vocabulary, vector = embedding_geometry(parameters)
    config = facts.snapshot.run.config or {}
    for key in ("vocab_size", "vocab", "model.vocab_size", "vocabulary"):
        if isinstance(config.get(key), int) and config[key] > 1:
            return int(config[key]), vector
    return vocabulary, vector


def apply_logits(facts: AllocationFacts, draft: Draft, parameters: Counter[int], vocabulary: int, vector: int) -> None:
    """Decide rows with a vocabulary extent.

    Args:
        facts, draft: as for every stage.
        parameters: sizes in bytes that are no logits, and how often each occurs.
        vocabulary: the number of words; below 2 where it is unknown.
        vector: the bytes of a hidden vector in the parameters' dtype; 0 where unknown.
    """
    if vocabulary < 2:
        return
    tagged = _wide_by_tag(facts, parameters, vocabulary)
    wide = tagged | (_wide_by_size(facts, parameters, vocabulary) & (facts.tags.rank[facts.timeline.metadata] == 0))
    place = np.isin(facts.phase, _WHERE) | _between_passes(facts)
    outside = place & ~facts.module & _after_a_model_ran(facts)
    head = place & facts.module & (facts.module_depth <= _head_depths(facts, wide, vocabulary))
    head &= _rare_or_tagged(facts, vocabulary)
    if _is_rare(vocabulary):
        head |= place & facts.module & _has_hidden_states(facts, wide, vocabulary, vector)
    # A recorded shape [batch, tokens, vocabulary] needs no place: whatever made it, these are logits.
    shaped = tagged & place & (facts.tags.rank[facts.timeline.metadata] >= 3)
    forward = wide & (outside | head | shaped) & draft.open
    known = distinct(facts.size[forward & (facts.size >= vocabulary * 16)])
    related = distinct(np.concatenate([known, known * 2, known // 2]))
    # A size alone says nothing of bytes and whole numbers: logits are floating point.
    backward = (facts.phase == Phase.BACKWARD.code) & is_among(facts.size, related) & ~facts.whole_numbers
    backward &= _not_parameters(facts, parameters)
    backward |= (facts.phase == Phase.BACKWARD.code) & tagged
    for phase in distinct(facts.phase[forward | backward]):
        rows = (forward | backward) & (facts.phase == phase)
        draft.fill(rows, Category.LOSS_LOGITS, Evidence.SHAPE, RULE, _DETAIL.get(int(phase), ""))


def _after_a_model_ran(facts: AllocationFacts) -> Bools:
    """Flag rows born after a model's first output; what generation allocates before it is no logits."""
    t = facts.timeline
    out = np.ones(len(t), bool)
    for span in facts.spans_of(Phase.GENERATE):
        born = facts.born_in(span)
        ran = np.flatnonzero(facts.module[born])
        if len(ran):
            out[born[: ran[0]]] = False
    return out


def apply_fused_logprobs(
    facts: AllocationFacts, draft: Draft, rows: Bools, parameters: Counter[int], vocabulary: int, vector: int
) -> None:
    """Decide by size, inside fused log-prob functions, the rows that are no tile of logits.

    The head's gradient has the head's size, or twice that in fp32. [tokens, hidden] (dH and its cast) is a
    whole number of hidden vectors. Under autocast the weight's tiles are cast one by one.
    """
    rows = rows & draft.open
    if not rows.any() or not vector:
        return
    backward = rows & (facts.phase == Phase.BACKWARD.code)
    casts = (draft.category == Category.WEIGHT_CASTS.code).any()
    if casts:
        extents = {vocabulary, 1 << 15, vocabulary % (1 << 15)} - {0}
        tile = rows & is_among(facts.size, [e * vector // 2 for e in extents])
        draft.decide(tile, Category.WEIGHT_CASTS, "logprob.weight-tile")
    head = (backward | (rows & ~facts.module)) & is_among(facts.size, [vocabulary * vector, vocabulary * vector * 2])
    held = _existing_gradient(facts, draft, vocabulary * vector)
    draft.decide(head & ~held, Category.GRADIENTS, "logprob.head-gradient")
    # Later in an accumulation it is added to the existing gradient and freed.
    draft.decide(head, Category.ACTIVATION_GRADIENTS, "logprob.head-gradient-in-flight")
    if not (backward & draft.open).any():
        return
    hidden = backward & draft.open & (facts.size % vector == 0) & (facts.size > 16 * vector)
    hidden &= facts.size < facts.size[backward & draft.open].max()
    draft.decide(hidden, Category.ACTIVATION_GRADIENTS, "logprob.hidden-gradient")


def _existing_gradient(facts: AllocationFacts, draft: Draft, size: int) -> Bools:
    """Flag rows born while a gradient of ``size`` bytes already exists from an earlier backward."""
    t = facts.timeline
    grads = np.flatnonzero(
        (draft.category == Category.GRADIENTS.code) & is_among(facts.size, [size, size // 2, size * 2])
    )
    out = np.zeros(len(t), bool)
    spans = facts.spans_of(Phase.BACKWARD)
    starts = [start for start, _ in spans]
    for row in grads:
        index = bisect_right(starts, t.alloc_event[row]) - 1
        settled = spans[index][1] if index >= 0 and t.alloc_event[row] < spans[index][1] else 0
        out[facts.born_in((settled, int(t.free_event[row])))] = True
    return out


def _wide_by_tag(facts: AllocationFacts, parameters: Counter[int], vocabulary: int) -> Bools:
    """Flag rows of floating-point numbers with a recorded shape [.., vocabulary] of at least two extents.

    Gradients of embeddings are [vocabulary, hidden]; their last extent tells them apart. [hidden, vocabulary], of a
    parameter's size, is a transposed embedding or its gradient where nothing computes logits of that very shape.
    """
    hits = (facts.tags.last_extent == vocabulary) & (facts.tags.rank >= 2)
    by_tag = hits[facts.timeline.metadata] & ~facts.whole_numbers
    matrix = (facts.tags.rank == 2)[facts.timeline.metadata] & ~_not_parameters(facts, parameters)
    wide: Bools = by_tag & ~matrix
    return wide


def _between_passes(facts: AllocationFacts) -> Bools:
    """Flag rows outside every phase, after a model has run: a loop's loss in its own main function."""
    t = facts.timeline
    first = int(t.alloc_event[facts.module & ~facts.ghost].min(initial=t.n_events))
    rows: Bools = (facts.phase == Phase.OTHER.code) & (t.alloc_event > first)
    return rows


def _wide_by_size(facts: AllocationFacts, parameters: Counter[int], vocabulary: int) -> Bools:
    rows = (facts.size % (2 * vocabulary) == 0) & (facts.size >= 2 * vocabulary)
    wide: Bools = rows & _not_parameters(facts, parameters)
    return wide


def _not_parameters(facts: AllocationFacts, parameters: Counter[int]) -> Bools:
    sizes = np.array(sorted(parameters), np.int64)
    return ~is_among(facts.size, np.concatenate([sizes, sizes * 2, sizes // 2]))


def _rare_or_tagged(facts: AllocationFacts, vocabulary: int) -> Bools:
    if _is_rare(vocabulary):
        return np.ones(len(facts.size), bool)
    # The vocabulary is a common divisor: only blocks of many whole rows, larger than the activations, count.
    tagged = facts.tags.rank[facts.timeline.metadata] > 0
    common = facts.size[facts.module & (facts.size > 4096)]
    usual = np.median(common) if len(common) else 0
    return tagged | (facts.linear & (facts.size >= 4 * usual))


def _is_rare(vocabulary: int) -> bool:
    """Tell whether so few sizes are whole numbers of vocabulary rows that a size is evidence by itself."""
    odd = vocabulary
    while odd % 2 == 0:
        odd //= 2
    return odd >= _RARE


def _has_hidden_states(facts: AllocationFacts, wide: Bools, vocabulary: int, vector: int) -> Bools:
    """Flag those of ``wide`` of as many tokens as hidden states of their phase: a head that is no module of its own."""
    out = np.zeros(len(wide), bool)
    for phase in distinct(facts.phase[wide & facts.module]):
        rows = np.flatnonzero(wide & facts.module & (facts.phase == phase))
        made = distinct(facts.size[facts.module & (facts.phase == phase)])
        hidden = facts.size[rows] // vocabulary * vector
        # The parameters have 2 or 4 bytes a number, and logits the hidden states' dtype or a wider one.
        out[rows] = np.any([(hidden % size == 0) & is_among(hidden // size, made) for size in (2, 4, 8)], axis=0)
    return out & (vector > 0)


def _head_depths(facts: AllocationFacts, wide: Bools, vocabulary: int) -> Ints:
    """Return for each row the module depth of its phase's head; 0 where no product is so much shallower than others.

    The head is the shallowest product with a parameter, if few are so shallow. A wrapper that trains and does not
    generate puts the same head deeper. In a recording that stops before the first head has run, the layers' products
    must not be taken for it. Where layers are as shallow as the head (a recurrent model's), few products are as wide.
    """
    products = facts.linear & facts.module & (facts.module_depth > 0)
    out = np.zeros(len(facts.size), np.int64)
    for phase in distinct(facts.phase[products]):
        here = products & (facts.phase == phase)
        depths = facts.module_depth[here]
        shallow = depths == depths.min()
        if shallow.sum() * 3 > len(depths) and _is_rare(vocabulary):
            shallow = wide[here]
        if 0 < shallow.sum() * 3 <= len(depths):
            out[facts.phase == phase] = depths[shallow].max()
    return out
