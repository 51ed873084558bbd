"""Gradients: what is born in backward and outlives it.

That is how a storage becomes ``.grad``; whatever its stack (a fused loss makes the head's gradient
itself), it is a gradient over its whole life. A history that ends inside a backward, by an
out-of-memory error, has no survivors: there the sizes of earlier gradients and of parameters decide,
for what has lived longer than backward's scratch does.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from memprof.attribution.facts import WORKSPACE_BYTES, Bools, Draft, Facts, multiset
from memprof.vocabulary import Category, Evidence, Phase

__all__ = ["apply_gradients", "apply_unfinished_gradients", "trained_sizes"]

RULE = "gradient.outlives-backward"
_SETTLED = 24  # births: backward's scratch rarely sees so many more


def apply_gradients(facts: Facts, draft: Draft) -> None:
    """Rows born in a backward that are still alive when the next phase allocates.

    Where the recording named the gradients themselves there is nothing to infer, and another tensor may outlive
    backward too: under checkpointing with adapters the embedding's output requires a gradient and keeps it.
    """
    if ((draft.category == Category.GRADIENTS.code) & (draft.evidence == Evidence.OWNER.code)).any():
        return
    t = facts.timeline
    zeroed = facts.freed_by(("*:zero_grad",)) & (facts.phase == Phase.BACKWARD.code) & ~facts.module
    draft.fill(zeroed, Category.GRADIENTS, Evidence.LIFETIME, "gradient.freed-by-zero-grad")
    for span in facts.spans_of(Phase.BACKWARD):
        if span[1] >= t.n_events:
            continue
        outlive = facts.born_in(span) & (t.free_event > span[1]) & ~facts.module
        outlive &= ~first_workspaces(facts, facts.born_in(span))
        # Allocated by the program between two calls of the engine, not by the engine.
        draft.fill(outlive & (facts.size > 0), Category.GRADIENTS, Evidence.LIFETIME, RULE)


def first_workspaces(facts: Facts, among: Bools) -> Bools:
    """The first block of a workspace's exact size on each stream that is never freed: cuBLAS keeps one per handle."""
    t = facts.timeline
    hit = np.zeros(len(among), bool)
    rows = np.flatnonzero(among & np.isin(facts.size, WORKSPACE_BYTES) & facts.survivor)
    seen: set[int] = set()
    for row in rows[np.argsort(t.alloc_event[rows], kind="stable")]:
        if int(t.stream[row]) not in seen:
            seen.add(int(t.stream[row]))
            hit[row] = True
    return hit


def trained_sizes(facts: Facts, draft: Draft) -> Counter[int]:
    """The multiset of the trained parameters' sizes: the gradients alive together at their fullest."""
    t = facts.timeline
    rows = np.flatnonzero(draft.category == Category.GRADIENTS.code)
    # Gradients older than the history were all there when it began.
    best = multiset(facts.size[rows[facts.ghost[rows]]])
    for span in facts.spans_of(Phase.BACKWARD):
        # Where nothing allocates between backward and zero_grad, they are gone when the next phase begins.
        instant = int(t.alloc_event[facts.born_in(span)].max(initial=span[0])) + 1
        alive = rows[(t.alloc_event[rows] < instant) & (instant <= t.free_event[rows])]
        found = multiset(facts.size[alive])
        if sum(s * c for s, c in found.items()) > sum(s * c for s, c in best.items()):
            best = found
    return best


def apply_unfinished_gradients(facts: Facts, draft: Draft, parameters: Counter[int]) -> None:
    """Gradients of a backward that the history does not see the end of."""
    t = facts.timeline
    spans = facts.spans_of(Phase.BACKWARD)
    if not spans or spans[-1][1] < t.n_events or not parameters:
        return
    rows = np.flatnonzero(facts.born_in(spans[-1]) & draft.open & ~facts.module)
    # Latest first: a sum of several contributions (tied weights) is born after them and is what stays.
    rows = rows[np.argsort(-t.alloc_event[rows], kind="stable")]
    events = np.sort(t.alloc_event[rows])
    age = np.searchsorted(events, t.free_event[rows]) - np.searchsorted(events, t.alloc_event[rows])
    ambiguous = set(np.unique(facts.size[facts.module]).tolist())
    # Where accumulation has left a gradient already, another of its size is on its way into it.
    existing = (draft.category == Category.GRADIENTS.code) & facts.survivor & ~facts.born_in(spans[-1])
    seen = multiset(facts.size[existing])
    chosen = []
    for row, lived in zip(rows.tolist(), age.tolist(), strict=True):
        size = int(facts.size[row])
        settled = lived >= _SETTLED or size not in ambiguous
        if facts.survivor[row] and settled and seen[size] < parameters[size]:
            seen[size] += 1
            chosen.append(row)
    draft.fill(
        np.array(chosen, np.int64), Category.GRADIENTS, Evidence.FINGERPRINT, "gradient.unfinished-backward",
        alternatives=(Category.ACTIVATION_GRADIENTS,),
    )  # fmt: skip
