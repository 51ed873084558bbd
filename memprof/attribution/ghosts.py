"""Allocations older than the history: no birth, often no stack, only a size, an address and a death.

Those that die in the trace tell what they were by where they die. Those that stay are read as multisets of sizes
(:mod:`memprof.attribution.copies`); what whole copies of the policy leave over may be another model.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from memprof.attribution.copies import copies_of_trained, known_copies, whole_models
from memprof.attribution.facts import WORKSPACE_BYTES, Bools, Draft, Facts, Ints, codes_of, multiset
from memprof.vocabulary import Category, Evidence, Phase

__all__ = ["apply_ghost_gradients", "apply_ghosts"]

_SMALL = 4096
_NO_GRAD = codes_of(Phase.OLD_LOGPROBS, Phase.REFERENCE_LOGPROBS, Phase.REWARD, Phase.EVALUATE)


def apply_ghosts(facts: Facts, draft: Draft, trained: Counter[int], parameters: Counter[int]) -> None:
    """Decide what was alive before the first event and is still undecided."""
    if not (facts.ghost & draft.open).any():
        return
    _by_death(facts, draft, trained, parameters)
    _workspaces(facts, draft, trained)
    if trained:
        copies_of_trained(facts, draft, trained)
    else:
        whole_models(facts, draft)
    _another_model(facts, draft, trained)
    if ((draft.category == Category.WEIGHTS.code) & (draft.evidence == Evidence.OWNER.code)).any():
        return  # the recording named every parameter: what it did not name is none, and nothing else is known of it
    rest = facts.ghost & draft.open
    sizes = facts.size
    draft.fill(
        rest & (sizes < _SMALL), Category.WEIGHTS, Evidence.FINGERPRINT, "ghost.small", alternatives=(Category.INPUTS,)
    )
    draft.fill(
        rest, Category.WEIGHTS, Evidence.FINGERPRINT, "ghost.base-weights",
        alternatives=(Category.REFERENCE_MODEL, Category.REWARD_MODEL, Category.OPTIMIZER_STATE),
    )  # fmt: skip


def apply_ghost_gradients(facts: Facts, draft: Draft) -> None:
    """What ``zero_grad`` frees was a gradient, whenever it was born."""
    zeroed = facts.ghost & ~facts.survivor & facts.freed_by(("*:zero_grad",))
    draft.fill(zeroed, Category.GRADIENTS, Evidence.LIFETIME, "ghost.freed-by-zero-grad")


def _by_death(facts: Facts, draft: Draft, trained: Counter[int], parameters: Counter[int]) -> None:
    """A history that opens in the middle of work: what dies where it would have died anyway."""
    dead = facts.ghost & draft.open & ~facts.survivor
    if not dead.any():
        return
    life = Evidence.LIFETIME
    sized = np.isin(facts.size, np.array(sorted(trained), np.int64))
    step = facts.death == Phase.OPTIMIZER_STEP.code
    if trained and _gradients_are_new(facts, draft, trained):
        # Gradients are born in the trace, so what the step replaces is its own state.
        draft.fill(dead & step & sized, Category.OPTIMIZER_STATE, life, "ghost.replaced-by-optimizer",
                   alternatives=(Category.GRADIENTS,))  # fmt: skip
    draft.fill(
        dead & step & sized, Category.GRADIENTS, life, "ghost.dies-in-optimizer", alternatives=(Category.TEMPORARIES,)
    )
    draft.fill(dead & step, Category.TEMPORARIES, life, "ghost.dies-in-optimizer", alternatives=(Category.GRADIENTS,))
    if (draft.category == Category.WEIGHT_CASTS.code).any():
        halves = np.array(sorted(s // 2 for s in parameters if s >= _SMALL), np.int64)
        cast = dead & np.isin(facts.size, halves)
        draft.fill(
            cast, Category.WEIGHT_CASTS, Evidence.FINGERPRINT, "ghost.weight-copy", alternatives=(Category.ACTIVATIONS,)
        )
    forward_or_back = np.isin(facts.death, codes_of(Phase.BACKWARD, Phase.FORWARD))
    opens = _opening_phase(facts)
    in_training = opens in codes_of(Phase.FORWARD, Phase.BACKWARD)
    if in_training:
        draft.fill(dead & forward_or_back, Category.ACTIVATIONS, life, "ghost.dies-in-backward", "saved",
                   (Category.ACTIVATION_GRADIENTS, Category.LOSS_LOGITS))  # fmt: skip
    if opens == Phase.GENERATE.code:
        large = _repeated(facts, dead, 6)
        draft.fill(dead & (facts.death == opens) & large, Category.KV_CACHE, life, "ghost.dies-in-generate",
                   alternatives=(Category.ACTIVATIONS,))  # fmt: skip
        draft.fill(dead & (facts.death == opens), Category.ACTIVATIONS, life, "ghost.dies-in-generate", "no_grad",
                   (Category.KV_CACHE,))  # fmt: skip
    if opens in _NO_GRAD:
        draft.fill(dead & (facts.death == opens), Category.ACTIVATIONS, life, "ghost.dies-in-its-phase", "no_grad")
    small = facts.size < 1 << 20
    draft.fill(dead & small, Category.INPUTS, life, "ghost.dies-later", alternatives=(Category.TEMPORARIES,))


def _gradients_are_new(facts: Facts, draft: Draft, trained: Counter[int]) -> bool:
    born = multiset(facts.size[(draft.category == Category.GRADIENTS.code) & ~facts.ghost])
    wanted = sum(s * c for s, c in trained.items())
    return sum(s * c for s, c in (born & trained).items()) >= 0.5 * wanted


def _opening_phase(facts: Facts) -> int:
    spans = facts.track.spans
    return next((p.code for s in spans for p in Phase if s.phase == p.value and s.phase != "other"), -1)


def _repeated(facts: Facts, among: Bools, times: int) -> Bools:
    values, counts = np.unique(facts.size[among], return_counts=True)
    return np.isin(facts.size, values[counts >= times])


def _workspaces(facts: Facts, draft: Draft, trained: Counter[int]) -> None:
    rows = np.flatnonzero(facts.ghost & draft.open & np.isin(facts.size, WORKSPACE_BYTES))
    if not len(rows):
        return
    others = facts.ghost & draft.open & (facts.size >= 1 << 20) & ~np.isin(facts.size, WORKSPACE_BYTES)
    counts = [c for c in multiset(facts.size[others]).values() if c >= 8]
    layers = int(np.gcd.reduce(np.array(counts))) if counts else 0
    for size in np.unique(facts.size[rows]):
        same = rows[facts.size[rows] == size]
        same = same[np.argsort(facts.timeline.address[same], kind="stable")]
        spare = _spare(len(same), trained[int(size)], layers)
        draft.fill(same[len(same) - spare :], Category.WORKSPACE, Evidence.FINGERPRINT, "workspace.exact-size",
                   alternatives=(Category.WEIGHTS,))  # fmt: skip


def _spare(count: int, trained: int, layers: int) -> int:
    """How many of ``count`` equal blocks are no parameters: those that whole copies or whole layers leave over."""
    if trained:
        return count % trained if count % trained <= 4 else 0
    if count <= 4:
        return count
    for unit in (layers, layers // 2):
        if unit >= 4 and 0 < count % unit <= 2:
            return count % unit
    return 0


def _another_model(facts: Facts, draft: Draft, trained: Counter[int]) -> None:
    """What whole copies of the policy leave over, if it is much, is a model of other sizes."""
    left = np.flatnonzero(facts.ghost & draft.open & facts.survivor & (facts.size >= _SMALL))
    scores = bool((facts.module & (facts.phase == Phase.REWARD.code)).any())
    refers = facts.has_phase(Phase.REFERENCE_LOGPROBS)
    if not len(left) or not (scores or refers):
        return
    role = Category.REWARD_MODEL if scores else Category.REFERENCE_MODEL
    policy = int(facts.size[facts.ghost & (draft.category == Category.WEIGHTS.code)].sum())
    if Category.WEIGHTS in known_copies(facts, draft, trained):
        if int(facts.size[left].sum()) > 0.05 * policy and (
            scores or Category.REFERENCE_MODEL not in known_copies(facts, draft, trained)
        ):
            draft.fill(left, role, Evidence.FINGERPRINT, "ghost.model-of-other-sizes", alternatives=(Category.WEIGHTS,))
        return
    if scores:
        upper = _upper_model(facts, left)
        draft.fill(upper, role, Evidence.FINGERPRINT, "ghost.second-model", alternatives=(Category.WEIGHTS,))


def _upper_model(facts: Facts, rows: Ints) -> Ints:
    """The upper part of an address range that holds two models of different sizes, empty if it holds one.

    A model's layers repeat its sizes over its whole range; between two models there is an address that
    (nearly) no size straddles, with several repeated sizes on either side.
    """
    rows = rows[np.argsort(facts.timeline.address[rows], kind="stable")]
    sizes = facts.size[rows]
    values, inverse, counts = np.unique(sizes, return_inverse=True, return_counts=True)
    position = np.arange(len(rows))
    first = np.full(len(values), len(rows))
    last = np.full(len(values), -1)
    np.minimum.at(first, inverse, position)
    np.maximum.at(last, inverse, position)
    repeated = counts >= 4
    bytes_of = values * counts
    best, where = 0.02 * float(bytes_of.sum()), -1
    for cut in np.unique(first[repeated]):
        straddling = float(bytes_of[(first < cut) & (last >= cut)].sum())
        below, above = (repeated & (last < cut)).sum(), (repeated & (first >= cut)).sum()
        if below >= 3 and above >= 3 and straddling <= best:
            best, where = straddling, int(cut)
    if where < 0:
        return rows[:0]
    # The embedding of the upper model stands alone below its first layer.
    while where > 0 and counts[inverse[where - 1]] <= 2 and sizes[where - 1] > sizes[where:].mean():
        where -= 1
    return rows[where:]
