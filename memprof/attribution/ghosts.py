"""Allocations older than the history: no birth, often no stack, only a size, an address and a death.

Those that die in the trace tell what they were by where they die. Those that stay are read as
multisets: the trained parameters' sizes (known from gradients) occur once for the policy, once more for a
reference, twice more for two moments in the parameters' dtype, at twice or half the size for moments in
fp32 or 8 bits. Equal sizes are told apart by address alone (memory fills upwards), so the
alternatives are recorded.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from memprof.attribution.facts import WORKSPACE_BYTES, Bools, Draft, Facts, Ints, codes_of, multiset
from memprof.attribution.models import rank_in_size
from memprof.snapshot.model import Action
from memprof.vocabulary import Category, Evidence, Phase

__all__ = ["apply_ghosts"]

_COPY = "fingerprint.parameter-copy"
_STATE_DTYPES = (1.0, 2.0, 0.5)
_SMALL = 4096
_NO_GRAD = codes_of(Phase.OLD_LOGPROBS, Phase.REFERENCE_LOGPROBS, Phase.REWARD, Phase.EVALUATE)


def apply_ghosts(facts: Facts, draft: Draft, trained: Counter[int], parameters: Counter[int]) -> None:
    """Decide what was alive before the first event and is still undecided."""
    if not (facts.ghost & draft.open).any():
        return
    _by_death(facts, draft, trained, parameters)
    _workspaces(facts, draft, trained)
    if trained:
        _copies_of_trained(facts, draft, trained)
    _whole_models(facts, draft)
    rest = facts.ghost & draft.open
    sizes = facts.size
    draft.fill(rest & (sizes < _SMALL), Category.WEIGHTS, Evidence.FINGERPRINT, "ghost.small", alternatives=(Category.INPUTS,))
    draft.fill(
        rest, Category.WEIGHTS, Evidence.FINGERPRINT, "ghost.base-weights",
        alternatives=(Category.REFERENCE_MODEL, Category.REWARD_MODEL, Category.OPTIMIZER_STATE),
    )  # fmt: skip


def _by_death(facts: Facts, draft: Draft, trained: Counter[int], parameters: Counter[int]) -> None:
    """A history that opens in the middle of work: what dies where it would have died anyway."""
    dead = facts.ghost & draft.open & ~facts.survivor
    if not dead.any():
        return
    life = Evidence.LIFETIME
    zeroed = dead & _freed_by(facts, ("torch/nn/modules/module.py:zero_grad", "torch/optim/*:zero_grad", "*:zero_grad"))
    draft.fill(zeroed, Category.GRADIENTS, life, "ghost.freed-by-zero-grad")
    sized = np.isin(facts.size, np.array(sorted(trained), np.int64))
    step = facts.death == Phase.OPTIMIZER_STEP.code
    draft.fill(dead & step & sized, Category.GRADIENTS, life, "ghost.dies-in-optimizer", alternatives=(Category.TEMPORARIES,))
    draft.fill(dead & step, Category.TEMPORARIES, life, "ghost.dies-in-optimizer", alternatives=(Category.GRADIENTS,))
    if (draft.category == Category.WEIGHT_CASTS.code).any():
        halves = np.array(sorted(s // 2 for s in parameters if s >= _SMALL), np.int64)
        cast = dead & np.isin(facts.size, halves)
        draft.fill(cast, Category.WEIGHT_CASTS, Evidence.FINGERPRINT, "ghost.weight-copy", alternatives=(Category.ACTIVATIONS,))
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


def _opening_phase(facts: Facts) -> int:
    spans = facts.track.spans
    return next((p.code for s in spans for p in Phase if s.phase == p.value and s.phase != "other"), -1)


def _repeated(facts: Facts, among: Bools, times: int) -> Bools:
    values, counts = np.unique(facts.size[among], return_counts=True)
    return np.isin(facts.size, values[counts >= times])


def _freed_by(facts: Facts, patterns: tuple[str, ...]) -> Bools:
    """Rows whose free was asked for under a matching frame."""
    t = facts.timeline
    hit = np.zeros(len(t), bool)
    trace = facts.snapshot.traces.get(t.device)
    if trace is None or not len(trace):
        return hit
    under = facts.stacks.count(patterns) > 0
    event = np.clip(t.release_event, 0, len(trace) - 1)
    freed = np.isin(trace.action[event], (int(Action.FREE_REQUESTED), int(Action.FREE_COMPLETED)))
    return under[trace.stack[event]] & freed & ~facts.survivor


def _workspaces(facts: Facts, draft: Draft, trained: Counter[int]) -> None:
    rows = np.flatnonzero(facts.ghost & draft.open & np.isin(facts.size, WORKSPACE_BYTES))
    if not len(rows):
        return
    for size in np.unique(facts.size[rows]):
        same = rows[facts.size[rows] == size]
        spare = len(same) % trained[int(size)] if trained[int(size)] else len(same)
        same = same[np.argsort(facts.timeline.address[same], kind="stable")]
        # More than a handful of equal blocks are parameters that happen to have the size.
        if 0 < spare <= 4:
            draft.fill(same[-spare:], Category.WORKSPACE, Evidence.FINGERPRINT, "workspace.exact-size",
                       alternatives=(Category.WEIGHTS,))  # fmt: skip


def _copies_of_trained(facts: Facts, draft: Draft, trained: Counter[int]) -> None:
    rows = np.flatnonzero(facts.ghost & draft.open)
    first = Category.ADAPTERS if _is_small_part(facts, trained) else Category.WEIGHTS
    state_is_old = _state_is_older(facts, draft)
    for factor in _STATE_DTYPES:
        sizes = {int(s * factor): c for s, c in trained.items() if s >= (_SMALL if factor != 1 else 1)}
        copies = _typical(multiset(facts.size[rows]), sizes)
        if factor != 1 and not (state_is_old and copies >= 2):
            continue
        known = _known_copies(facts, draft, trained)
        roles = [Category.OPTIMIZER_STATE] * copies if factor != 1 else _roles(facts, copies, first, known, state_is_old)
        _fill_copies(facts, draft, rows, sizes, roles)
        rows = np.flatnonzero(facts.ghost & draft.open)


def _known_copies(facts: Facts, draft: Draft, trained: Counter[int]) -> set[Category]:
    """Roles that stacks or owners have already filled with a whole copy: blocks keep the stack of their birth."""
    wanted = sum(s * c for s, c in trained.items())
    known = set()
    for role in (Category.WEIGHTS, Category.ADAPTERS, Category.REFERENCE_MODEL, Category.OPTIMIZER_STATE):
        have = multiset(facts.size[draft.category == role.code])
        if sum(s * c for s, c in (have & trained).items()) >= 0.8 * wanted:
            known.add(role)
    return known


def _roles(facts: Facts, copies: int, first: Category, known: set[Category], state_is_old: bool) -> list[Category]:
    """What each copy of the trained multiset is, in order of address."""
    roles = [] if first in known else [first]
    left = copies - len(roles)
    reference = first is Category.WEIGHTS and Category.REFERENCE_MODEL not in known
    state = 0
    if state_is_old and Category.OPTIMIZER_STATE not in known:
        # Two moments where they fit; one (momentum) where a single copy is left and nothing else claims it.
        claimed = reference and (facts.has_phase(Phase.REFERENCE_LOGPROBS) or left > 2)
        state = 2 if left >= 2 else int(left == 1 and not claimed)
    roles += [Category.REFERENCE_MODEL] * max(left - state, 0)
    return roles + [Category.OPTIMIZER_STATE] * state


def _fill_copies(facts: Facts, draft: Draft, rows: Ints, sizes: dict[int, int], roles: list[Category]) -> None:
    rows = rows[np.argsort(facts.timeline.address[rows], kind="stable")]
    mine = rows[np.isin(facts.size[rows], np.array(sorted(sizes), np.int64))]
    if not len(mine) or not roles:
        return
    have = multiset(facts.size[mine])
    rank = rank_in_size(facts.size[mine])
    # Where a size occurs more often than copies explain, the surplus belongs to the first copy (buffers).
    per = np.array([max(sizes[int(s)], 1) for s in facts.size[mine]], np.int64)
    surplus = np.array([max(have[int(s)] - sizes[int(s)] * len(roles), 0) for s in facts.size[mine]], np.int64)
    which = np.clip((rank - surplus) // per, 0, len(roles) - 1)
    others = tuple(dict.fromkeys(roles))
    for k, role in enumerate(roles):
        draft.fill(mine[which == k], role, Evidence.FINGERPRINT, _COPY, alternatives=tuple(c for c in others if c is not role))


def _typical(have: Counter[int], wanted: dict[int, int]) -> int:
    """How many whole copies there are, by the bytes' median."""
    if not wanted:
        return 0
    copies = np.array([have[s] // c for s, c in wanted.items()])
    weight = np.array([s * c for s, c in wanted.items()], float)
    order = np.argsort(copies)
    return int(copies[order][np.searchsorted(np.cumsum(weight[order]), weight.sum() / 2)])


def _is_small_part(facts: Facts, trained: Counter[int]) -> bool:
    """Whether what is trained is small beside all that was there: adapters, not the model."""
    return sum(s * c for s, c in trained.items()) < 0.15 * int(facts.size[facts.ghost & facts.survivor].sum())


def _state_is_older(facts: Facts, draft: Draft) -> bool:
    """Whether the optimizer had its state before the history began: it makes none in it."""
    made = (draft.category == Category.OPTIMIZER_STATE.code) & ~facts.ghost
    return int(facts.size[made].sum()) < 0.1 * int(facts.size[draft.category == Category.GRADIENTS.code].sum())


def _whole_models(facts: Facts, draft: Draft) -> None:
    """No gradient ever seen: equal copies show in the counts of the sizes themselves."""
    rows = np.flatnonzero(facts.ghost & draft.open & (facts.size >= _SMALL))
    sizes = multiset(facts.size[rows])
    counts = np.array(list(sizes.values()), np.int64)
    if len(counts) < 4 or (copies := int(np.gcd.reduce(counts))) < 2 or copies > 5:
        return
    roles = {
        2: [Category.WEIGHTS, Category.REFERENCE_MODEL],
        3: [Category.WEIGHTS, Category.OPTIMIZER_STATE, Category.OPTIMIZER_STATE],
        4: [Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER_STATE, Category.OPTIMIZER_STATE],
        5: [Category.WEIGHTS, Category.REFERENCE_MODEL, Category.GRADIENTS, Category.OPTIMIZER_STATE, Category.OPTIMIZER_STATE],
    }[copies]  # fmt: skip
    _fill_copies(facts, draft, rows, {s: c // copies for s, c in sizes.items()}, roles)
