"""Whole copies of a model among what is older than the history, read as multisets of sizes.

The trained parameters' sizes (known from gradients) occur once for the policy, once more for a reference, twice more
for two moments in the parameters' dtype, at twice or half the size for moments in fp32 or 8 bits. Equal sizes are told
apart by address alone (memory fills upwards), so the alternatives are recorded.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from memprof.attribution.facts import Draft, Facts, Ints, multiset
from memprof.attribution.models import rank_in_size
from memprof.vocabulary import Category, Evidence, Phase

__all__ = ["copies_of_trained", "known_copies", "whole_models"]

_COPY = "fingerprint.parameter-copy"
_STATE_DTYPES = (1.0, 2.0, 0.5)
_SMALL = 4096
_LARGE = 1 << 16
_CLEAR = 0.1  # a smaller difference between two shares says nothing


def copies_of_trained(facts: Facts, draft: Draft, trained: Counter[int]) -> None:
    """Decide the whole copies of the trained parameters' sizes (``trained``: bytes to how many have them)."""
    rows = np.flatnonzero(facts.ghost & draft.open)
    first = Category.ADAPTERS if _is_small_part(facts, trained) else Category.WEIGHTS
    state_is_old = _state_is_older(facts, draft)
    for factor in _STATE_DTYPES:
        sizes = {int(s * factor): c for s, c in trained.items() if s >= (_SMALL if factor != 1 else 1)}
        copies = _typical(multiset(facts.size[rows]), sizes)
        if factor != 1 and not (state_is_old and copies >= 2):
            continue
        known = known_copies(facts, draft, trained)
        roles = (
            [Category.OPTIMIZER_STATE] * copies if factor != 1 else _roles(facts, copies, first, known, state_is_old)
        )
        if factor == 1 and _state_is_partial(facts, draft, trained):
            # The history opens inside the step that makes the state: what is over is the part made before.
            _fill_copies(facts, draft, rows, sizes, [r for r in roles if r is not Category.OPTIMIZER_STATE], exact=True)
            left = facts.ghost & draft.open & np.isin(facts.size, np.array(sorted(sizes), np.int64))
            draft.fill(left, Category.OPTIMIZER_STATE, Evidence.FINGERPRINT, _COPY, alternatives=(first,))
        _fill_copies(facts, draft, rows, sizes, roles)
        rows = np.flatnonzero(facts.ghost & draft.open)


def known_copies(facts: Facts, draft: Draft, trained: Counter[int]) -> set[Category]:
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
    if first is Category.WEIGHTS:
        roles += [Category.REFERENCE_MODEL] * max(left - state, 0)
    return roles + [Category.OPTIMIZER_STATE] * state


def _oldest_first(facts: Facts, rows: Ints, roles: list[Category]) -> Ints:
    """Rows of equal copies in the order they were probably made, by address."""
    t = facts.timeline
    rows = rows[np.argsort(t.address[rows], kind="stable")]
    if len(roles) < 2:
        return rows
    if _without_segments(facts):
        # A C library's memory: a loaded file lies packed in one mapping, and mappings grow downwards;
        # what is made tensor by tensor lies scattered over the heap, which grows upwards.
        every = np.flatnonzero(facts.ghost)
        ends = np.unique(t.address[every] + facts.size[every])
        starts = np.unique(t.address[every])
        packed = np.isin(t.address[rows], ends) | np.isin(t.address[rows] + facts.size[rows], starts)
        return rows[np.lexsort((np.where(packed, -t.address[rows], t.address[rows]), ~packed))]
    return rows[::-1] if _grows_downwards(facts, rows, len(roles) if Category.OPTIMIZER_STATE in roles else 0) else rows


def _grows_downwards(facts: Facts, rows: Ints, copies: int) -> bool:
    """Whether later allocations lie lower, as on some drivers.

    What is born in the trace outside the old blocks' range shows the direction. Else the copies themselves may:
    optimizer state is the latest, and as two moments are made in turn for each parameter, its equal sizes stand
    side by side (``copies`` is 0 where there is none).
    """
    t = facts.timeline
    old = t.address[rows]
    new = ~facts.ghost & (t.size >= _LARGE)
    below = int(t.size[new & (t.address < old.min())].sum())
    above = int(t.size[new & (t.address > old.max())].sum())
    if max(below, above) > 2 * min(below, above):
        return below > above
    sizes = facts.size[rows]
    lower = upper = weight = 0.0
    # The caching allocator keeps these apart (small pool, shared segments, segments of their own).
    for low, high in ((_SMALL, 1 << 20), (1 << 20, 10 << 20), (10 << 20, 1 << 62)):
        of_pool = sizes[(sizes >= low) & (sizes < high)]
        part = len(of_pool) // max(copies, 2)
        if copies and part >= 8:
            lower += part * _paired_share(of_pool[:part])
            upper += part * _paired_share(of_pool[-part:])
            weight += part
    return lower - upper > _CLEAR * weight > 0


def _without_segments(facts: Facts) -> bool:
    """Whether a tensor trace wrote this: its blocks are storages, of any size, each a segment of its own."""
    segments = facts.snapshot.segments.get(facts.timeline.device)
    blocks = facts.snapshot.blocks.get(facts.timeline.device)
    if segments is None or blocks is None or not len(segments):
        return True
    return (
        len(segments) == len(blocks) and bool((segments.total == blocks.size).all()) and bool((blocks.size % 512).any())
    )


def _paired_share(sizes: Ints) -> float:
    """The share of entries that stand in pairs of equal neighbours."""
    edge = np.flatnonzero(np.r_[True, sizes[1:] != sizes[:-1], True])
    lengths = np.diff(edge)
    return float((lengths // 2 * 2).sum()) / len(sizes)


def _state_is_partial(facts: Facts, draft: Draft, trained: Counter[int]) -> bool:
    """Whether only some parameters got their optimizer state in the trace."""
    sized = np.isin(facts.size, np.array(sorted(trained), np.int64))
    made = multiset(facts.size[(draft.category == Category.OPTIMIZER_STATE.code) & ~facts.ghost & sized])
    copies = {made[s] / c for s, c in trained.items()}
    return bool(made) and len(copies) > 1


def _fill_copies(
    facts: Facts, draft: Draft, rows: Ints, sizes: dict[int, int], roles: list[Category], *, exact: bool = False
) -> None:
    mine = rows[np.isin(facts.size[rows], np.array(sorted(sizes), np.int64))]
    mine = _oldest_first(facts, mine, roles)
    if roles and roles[0] is Category.ADAPTERS:
        # Sizes shared with the base model: adapters were added to a finished model, so they come after it.
        ahead = rank_in_size(facts.size[mine][::-1])[::-1]
        mine = mine[ahead < np.array([sizes[int(s)] * len(roles) for s in facts.size[mine]], np.int64)]
    if not len(mine) or not roles:
        return
    have = multiset(facts.size[mine])
    rank = rank_in_size(facts.size[mine])
    # Where a size occurs more often than copies explain, the surplus belongs to the first copy (buffers).
    per = np.array([max(sizes[int(s)], 1) for s in facts.size[mine]], np.int64)
    if exact:
        fits = rank < per * len(roles)
        mine, rank, per = mine[fits], rank[fits], per[fits]
        have = multiset(facts.size[mine])
    surplus = np.array([max(have[int(s)] - sizes[int(s)] * len(roles), 0) for s in facts.size[mine]], np.int64)
    which = np.clip((rank - surplus) // per, 0, len(roles) - 1)
    others = tuple(dict.fromkeys(roles))
    for k, role in enumerate(roles):
        draft.fill(
            mine[which == k], role, Evidence.FINGERPRINT, _COPY, alternatives=tuple(c for c in others if c is not role)
        )


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


def whole_models(facts: Facts, draft: Draft) -> None:
    """No gradient ever seen: equal copies show in the counts of the sizes themselves.

    A model alone has an odd number of norms (two a layer and a final one), so an even count of the most frequent
    small size, and of nearly all bytes, means whole copies. Blocks that kept the Python stack of their birth are
    none of this: an optimizer's or a gradient's would have been known by it.
    """
    told = facts.stacks.has_python[facts.timeline.stack]
    rows = np.flatnonzero(facts.ghost & draft.open & (facts.size >= 512) & ~told)
    sizes = multiset(facts.size[rows])
    small = {s: c for s, c in sizes.items() if s <= 1 << 17}
    if len(sizes) < 4 or not small:
        return
    norm, norms = max(small.items(), key=lambda item: item[1])
    alone = {s: c for s, c in sizes.items() if s >= 1 << 20 and c <= norms / 4}
    total_alone = sum(s * c for s, c in alone.items())
    total = sum(s * c for s, c in sizes.items())
    for copies in (5, 4, 3, 2):
        whole = sum(s * c for s, c in sizes.items() if c % copies == 0 or s == norm)
        # The embedding and the head stand outside the layers: they too must be there that often.
        apart = sum(s * c for s, c in alone.items() if c % copies == 0)
        stray = 0 if copies == 2 else 2
        if norms % copies <= stray and norms >= 4 * copies and whole >= 0.95 * total and apart >= 0.8 * total_alone > 0:
            break
    else:
        return
    whole_sizes = {s: c // copies for s, c in sizes.items() if c >= copies}
    _fill_copies(facts, draft, rows, whole_sizes, _roles_without_gradients(facts, copies))


def _roles_without_gradients(facts: Facts, copies: int) -> list[Category]:
    """Roles of equal copies when no gradient is born in the trace.

    A whole backward without a new gradient means that gradients were there before it (accumulation, or
    zeroed in place).
    """
    refers = facts.has_phase(Phase.REFERENCE_LOGPROBS)
    accumulates = any(end < facts.timeline.n_events for _, end in facts.spans_of(Phase.BACKWARD))
    weights, reference, state = Category.WEIGHTS, Category.REFERENCE_MODEL, Category.OPTIMIZER_STATE
    if copies == 2:
        return [weights, Category.GRADIENTS if accumulates and not refers else reference]
    if copies == 3 and accumulates:
        return [weights, reference if refers else Category.GRADIENTS, Category.GRADIENTS if refers else state]
    if copies == 4 and refers and not accumulates:
        return [weights, reference, state, state]
    return {
        3: [weights, state, state],
        4: [weights, Category.GRADIENTS, state, state],
        5: [weights, reference, Category.GRADIENTS, state, state],
    }[copies]
