"""Decide gradients: blocks that are born in a backward and outlive it.

A storage becomes ``.grad`` in this way. Whatever its stack (a fused loss makes the head's gradient itself), it
is a gradient over its whole life. A history that ends inside a backward, by an out-of-memory error, has no
survivors. There a block that has lived longer than backward's scratch does is decided by its size: that of an
earlier gradient or of a parameter.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from memprof.attribution.facts import WORKSPACE_BYTES, AllocationFacts, Draft, Ints, multiset
from memprof.snapshot.model import distinct, is_among
from memprof.vocabulary import Category, Evidence, Phase

_SMALLEST_MATRIX = 1 << 16  # bytes; vectors share their size with much else
_REMNANT = 0.25  # a name may still be bound to the last gradient that a loop added up
_SETTLED = 24  # births: backward's scratch rarely outlives so many


def apply_gradients(facts: AllocationFacts, draft: Draft) -> None:
    """Decide rows born in a backward that are still alive when the next phase allocates.

    Where the recording named the gradients, nothing is inferred, because another tensor may outlive backward too:
    under checkpointing with adapters, the embedding's output requires a gradient and keeps it.
    """
    if ((draft.category == Category.GRADIENTS.code) & (draft.evidence == Evidence.OWNER.code)).any():
        return
    t = facts.timeline
    # Where nothing allocates after a backward, its phase lasts until then; what the program frees outlived it.
    freed = facts.freed_by_program & (facts.phase == Phase.BACKWARD.code) & ~facts.module
    draft.decide(freed, Category.GRADIENTS, "gradient.freed-by-program")
    for span in facts.spans_of(Phase.BACKWARD):
        if span[1] >= t.n_events:
            continue
        rows = facts.born_in(span)
        outlive = (t.free_event[rows] > span[1]) & ~facts.module[rows] & (facts.size[rows] > 0)
        rows = np.setdiff1d(rows[outlive], first_workspaces(facts, rows), assume_unique=True)
        draft.decide(rows, Category.GRADIENTS, "gradient.outlives-backward")


def first_workspaces(facts: AllocationFacts, among: Ints) -> Ints:
    """Return the cuBLAS workspaces among some rows: the first of the exact size on each stream, if never freed."""
    t = facts.timeline
    rows = among[is_among(facts.size[among], WORKSPACE_BYTES) & facts.survivor[among]]
    first = []
    seen: set[int] = set()
    for row in rows[np.argsort(t.alloc_event[rows], kind="stable")]:
        if int(t.stream[row]) not in seen:
            seen.add(int(t.stream[row]))
            first.append(row)
    return np.array(first, np.int64)


def trained_sizes(facts: AllocationFacts, draft: Draft) -> Counter[int]:
    """Count the trained parameters' sizes in bytes, from the most gradients that are alive together."""
    t = facts.timeline
    rows = np.flatnonzero(draft.category == Category.GRADIENTS.code)
    # Gradients older than the history were all there when it began.
    best = multiset(facts.size[rows[facts.ghost[rows]]])
    fullest = sum(s * c for s, c in best.items())
    # Where nothing allocates between backward and zero_grad, gradients are gone when the next phase begins.
    instants = [
        int(t.alloc_event[born].max()) + 1 for s in facts.spans_of(Phase.BACKWARD) if len(born := facts.born_in(s))
    ]
    order = np.argsort(t.alloc_event[rows], kind="stable")
    births, deaths = t.alloc_event[rows][order], np.sort(t.free_event[rows])
    born_bytes = np.r_[0, np.cumsum(facts.size[rows][order])]
    dead_bytes = np.r_[0, np.cumsum(facts.size[rows][np.argsort(t.free_event[rows], kind="stable")])]
    for instant in instants:
        held = born_bytes[np.searchsorted(births, instant)] - dead_bytes[np.searchsorted(deaths, instant)]
        if held > fullest:
            alive = rows[(t.alloc_event[rows] < instant) & (instant <= t.free_event[rows])]
            # A name bound to the last backward's gradients is bound to new ones once this backward has returned.
            lasting = alive[t.free_event[alive] > facts.next_birth(instant)]
            alive = lasting if 2 * facts.size[lasting].sum() >= held else alive
            best, fullest = multiset(facts.size[alive]), int(held)
    return best


def steps_lack_gradients(facts: AllocationFacts, draft: Draft) -> bool:
    """Tell whether the gradients of every backward are gone when a step begins: they were added to older buffers."""
    t, grads = facts.timeline, np.flatnonzero((draft.category == Category.GRADIENTS.code) & ~facts.ghost)
    wanted = sum(s * c for s, c in trained_sizes(facts, draft).items())
    first = int(t.alloc_event[grads].min(initial=t.n_events))
    steps = [start for start, _ in facts.spans_of(Phase.OPTIMIZER_STEP) if start > first]
    alive = (int(facts.size[grads[(t.alloc_event[grads] < s) & (t.free_event[grads] > s)]].sum()) for s in steps)
    return bool(steps) and all(found < _REMNANT * wanted for found in alive)


def apply_unfinished_gradients(facts: AllocationFacts, draft: Draft, parameters: Counter[int]) -> None:
    """Decide the gradients of a backward that the history does not see the end of."""
    t = facts.timeline
    spans = facts.spans_of(Phase.BACKWARD)
    if not spans or spans[-1][1] < t.n_events or not parameters:
        return
    rows = facts.born_in(spans[-1])
    rows = rows[draft.open[rows] & ~facts.module[rows]]
    # Latest first: the sum of several contributions (tied weights) is born after them, and it stays.
    rows = rows[np.argsort(-t.alloc_event[rows], kind="stable")]
    events = np.sort(t.alloc_event[rows])
    age = np.searchsorted(events, t.free_event[rows]) - np.searchsorted(events, t.alloc_event[rows])
    ambiguous = set(distinct(facts.size[facts.module]).tolist())
    # Where accumulation has already left a gradient, another block of its size is about to be added to it.
    existing = (draft.category == Category.GRADIENTS.code) & facts.survivor
    existing[facts.born_in(spans[-1])] = False
    seen = multiset(facts.size[existing])
    chosen = []
    for row, lived in zip(rows.tolist(), age.tolist(), strict=True):
        size = int(facts.size[row])
        settled = lived >= _SETTLED or size not in ambiguous
        if facts.survivor[row] and settled and seen[size] < parameters[size]:
            seen[size] += 1
            chosen.append(row)
    draft.decide(np.array(chosen, np.int64), Category.GRADIENTS, "gradient.unfinished-backward")


def apply_gradients_in_flight(facts: AllocationFacts, draft: Draft, parameters: Counter[int]) -> None:
    """Decide the gradients of parameters that one backward makes and adds to others before it ends.

    Several passes before one backward, a tied head or a cast make more than one for each parameter; one alone is added
    to its ``.grad`` at once, and is that backward's scratch. They have a
    parameter's shape (or its transpose), which no activation of the passes has; without recorded shapes, its size.
    """
    rank, shape = facts.tags.rank[facts.timeline.metadata], np.array(facts.tags.column("shape"))
    born = draft.open & (facts.phase == Phase.BACKWARD.code) & ~facts.module & ~facts.raw_bytes & ~facts.whole_numbers
    sizes = np.array([s for s in sorted(parameters) if s >= _SMALLEST_MATRIX], np.int64)
    born &= is_among(facts.size, np.concatenate([sizes, sizes // 2, sizes * 2]))
    if not born.any():
        return
    grads = draft.category == Category.GRADIENTS.code
    leaves = {text for text in shape[distinct(facts.timeline.metadata[grads])].tolist() if text}
    leaves |= {"x".join(reversed(text.split("x"))) for text in leaves if text.count("x") == 1}
    # A cast inside a module may be the weight's own.
    cast = np.array(["_to_copy" in op for op in facts.tags.column("op")], bool)[facts.timeline.metadata]
    made = facts.module & ~facts.ghost & ~cast
    activations = {_flat(text) for text in shape[distinct(facts.timeline.metadata[made])].tolist() if text}
    of_leaf = np.array([text in leaves and text not in activations for text in shape.tolist()], bool)
    tagged = born & (rank > 0) & of_leaf[facts.timeline.metadata]
    tagged = _more_than_parameters(facts, tagged, parameters)
    untagged = born & (rank == 0) & ~is_among(facts.size, distinct(facts.size[made])) & (not leaves) & ~facts.survivor
    t, waiting = facts.timeline, np.flatnonzero(untagged)
    births = np.sort(t.alloc_event[facts.birth_order])
    age = np.searchsorted(births, t.free_event[waiting]) - np.searchsorted(births, t.alloc_event[waiting])
    untagged[waiting[age < _SETTLED]] = False  # added at once to what is there
    untagged = _more_than_parameters(facts, untagged, parameters)
    draft.decide(tagged | untagged, Category.GRADIENTS, "gradient.in-flight")


def _more_than_parameters(
    facts: AllocationFacts, rows: NDArray[np.bool_], parameters: Counter[int]
) -> NDArray[np.bool_]:
    """Keep those of ``rows`` of whose size one backward makes more than there are parameters."""
    kept = np.zeros(len(rows), bool)
    for span in facts.spans_of(Phase.BACKWARD):
        born = facts.born_in(span)
        born = born[rows[born]]
        for size, count in multiset(facts.size[born]).items():
            if count > max(parameters[s] for s in (size, size * 2, size // 2)):
                kept[born[facts.size[born] == size]] = True
    return kept


def _flat(shape: str) -> str:
    """Return a shape as a matrix of its last extent, as products see it."""
    extents = shape.split("x")
    if len(extents) < 3:
        return shape
    rows = 1
    for extent in extents[:-1]:
        rows *= int(extent) if extent.isdigit() else 0
    return f"{rows}x{extents[-1]}"


_BLOCK = 512


def apply_buckets(facts: AllocationFacts, draft: Draft) -> None:
    """Decide as buckets the open rows of exactly a bucket's size that live to the end, one per bucket.

    Buckets that alias ``.grad`` have an owner and are not in the recorded list.
    """
    stated = Counter(size for size in facts.snapshot.run.buckets if size > 0)
    t = facts.timeline
    for size, count in stated.items():
        # The sizes in a trace are requested bytes or block bytes.
        alike = is_among(facts.size, (size, -(-size // _BLOCK) * _BLOCK))
        rows = np.flatnonzero(alike & facts.survivor & draft.open)
        # A tensor trace first sees a bucket in the backward that fills it; of several candidates the oldest count.
        rows = rows[np.argsort(t.alloc_event[rows], kind="stable")][:count]
        draft.decide(rows, Category.COMMUNICATION, "recorded.bucket-size")
