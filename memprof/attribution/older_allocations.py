"""Decide ghosts: allocations older than the history, with a size, an address, a death, and often no stack.

A ghost that dies in the trace is known by where it dies. Ghosts that stay are read as multisets of sizes: whole
copies of the policy's sizes are models, gradients or optimizer state, and the rest may be another model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from memprof.attribution.facts import WORKSPACE_BYTES, AllocationFacts, Bools, Draft, Ints, codes_of, multiset
from memprof.attribution.gradients import steps_lack_gradients
from memprof.attribution.loaded_models import NEVER_RUNS, NOTICEABLE, is_language_model, rank_in_size
from memprof.snapshot.model import distinct, is_among
from memprof.vocabulary import Category, Evidence, Phase

_COPY = "fingerprint.parameter-copy"
_STATE_DTYPES = (1.0, 2.0, 0.5)
_SMALL = 4096
_LARGE = 1 << 16
_NEARLY_ALL = 0.9
_CLEAR = 0.1  # a smaller difference between two shares is not evidence


def copies_of_trained(facts: AllocationFacts, draft: Draft, trained: Counter[int]) -> None:
    """Decide the whole copies of the trained parameters' sizes (``trained``: how many have each size in bytes)."""
    rows = np.flatnonzero(facts.ghost & draft.open)
    first = Category.ADAPTERS if _is_small_part(facts, draft, trained) else Category.WEIGHTS
    state_is_old = _state_is_older(facts, draft)
    for factor in _STATE_DTYPES:
        sizes = {int(s * factor): c for s, c in trained.items() if s >= (_SMALL if factor != 1 else 1)}
        copies = _typical(multiset(facts.size[rows]), sizes)
        if factor != 1 and not (state_is_old and copies >= 2):
            continue
        known = known_copies(facts, draft, trained)
        accumulates = _accumulates(facts, draft, trained) or steps_lack_gradients(facts, draft)
        roles = (
            [Category.OPTIMIZER_STATE] * copies
            if factor != 1
            else _roles(facts, copies, first, known, state_is_old, accumulates)
        )
        if factor == 1 and _state_is_partial(facts, draft, trained):
            # The history begins inside the step that makes the state: the ghosts left over are the part made before.
            _fill_copies(facts, draft, rows, sizes, [r for r in roles if r is not Category.OPTIMIZER_STATE], exact=True)
            left = facts.ghost & draft.open & is_among(facts.size, np.array(sorted(sizes), np.int64))
            draft.fill(left, Category.OPTIMIZER_STATE, Evidence.FINGERPRINT, _COPY, alternatives=(first,))
        _fill_copies(facts, draft, rows, sizes, roles)
        rows = np.flatnonzero(facts.ghost & draft.open)


def known_copies(facts: AllocationFacts, draft: Draft, trained: Counter[int]) -> set[Category]:
    """Return the roles that stacks or owners have already filled with a whole copy.

    Ghosts can have stacks, because blocks keep the stack of their birth.
    """
    wanted = sum(s * c for s, c in trained.items())
    known = set()
    for role in (Category.WEIGHTS, Category.ADAPTERS, Category.REFERENCE_MODEL, Category.OPTIMIZER_STATE):
        have = multiset(facts.size[draft.category == role.code])
        if sum(s * c for s, c in (have & trained).items()) >= 0.8 * wanted:
            known.add(role)
    return known


def _roles(
    facts: AllocationFacts, copies: int, first: Category, known: set[Category], state_is_old: bool, accumulates: bool
) -> list[Category]:
    """Return the role of each copy of the trained multiset, in order of address."""
    roles = [] if first in known else [first]
    roles += [Category.GRADIENTS] * int(accumulates and len(roles) < copies)
    left = copies - len(roles)
    reference = first is Category.WEIGHTS and Category.REFERENCE_MODEL not in known
    state = 0
    if state_is_old and Category.OPTIMIZER_STATE not in known:
        # Two moments where two copies are left; one (momentum) where a single copy has no other role.
        claimed = reference and (facts.has_phase(Phase.REFERENCE_LOGPROBS) or left > 2)
        state = 2 if left >= 2 else int(left == 1 and not claimed)
    if first is Category.WEIGHTS:
        roles += [Category.REFERENCE_MODEL] * max(left - state, 0)
    return roles + [Category.OPTIMIZER_STATE] * state


def _oldest_first(facts: AllocationFacts, rows: Ints, roles: list[Category]) -> Ints:
    """Sort rows of equal copies by address, in the order they were probably made."""
    t = facts.timeline
    rows = rows[np.argsort(t.address[rows], kind="stable")]
    if len(roles) < 2:
        return rows
    if _without_segments(facts):
        # This memory comes from the C library. A loaded file lies packed in one mapping, and mappings grow
        # downwards. Tensors made one by one lie scattered over the heap, which grows upwards.
        every = np.flatnonzero(facts.ghost)
        ends = distinct(t.address[every] + facts.size[every])
        starts = distinct(t.address[every])
        packed = is_among(t.address[rows], ends) | is_among(t.address[rows] + facts.size[rows], starts)
        return rows[np.lexsort((np.where(packed, -t.address[rows], t.address[rows]), ~packed))]
    return rows[::-1] if _grows_downwards(facts, rows, len(roles) if Category.OPTIMIZER_STATE in roles else 0) else rows


def _grows_downwards(facts: AllocationFacts, rows: Ints, copies: int) -> bool:
    """Tell whether later allocations have lower addresses, as on some drivers.

    Blocks born in the trace outside the ghosts' address range show the direction. Without them the copies may show
    it: optimizer state was made last, and since each parameter's two moments are made in turn, its equal sizes are
    neighbours (``copies`` is 0 where there is no state).
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
    # The caching allocator keeps three kinds apart: small pool, shared segments, segments of one block.
    for low, high in ((_SMALL, 1 << 20), (1 << 20, 10 << 20), (10 << 20, 1 << 62)):
        of_pool = sizes[(sizes >= low) & (sizes < high)]
        part = len(of_pool) // max(copies, 2)
        if copies and part >= 8:
            lower += part * _paired_share(of_pool[:part])
            upper += part * _paired_share(of_pool[-part:])
            weight += part
    return lower - upper > _CLEAR * weight > 0


def _without_segments(facts: AllocationFacts) -> bool:
    """Tell whether this is a tensor trace, whose blocks are storages of any size, each its own segment."""
    segments = facts.snapshot.segments.get(facts.timeline.device)
    blocks = facts.snapshot.blocks.get(facts.timeline.device)
    if segments is None or blocks is None or not len(segments):
        return True
    return (
        len(segments) == len(blocks) and bool((segments.total == blocks.size).all()) and bool((blocks.size % 512).any())
    )


def _paired_share(sizes: Ints) -> float:
    """Return the share of entries that form pairs of equal neighbours."""
    edge = np.flatnonzero(np.r_[True, sizes[1:] != sizes[:-1], True])
    lengths = np.diff(edge)
    return float((lengths // 2 * 2).sum()) / len(sizes)


def _state_is_partial(facts: AllocationFacts, draft: Draft, trained: Counter[int]) -> bool:
    """Tell whether only some parameters got their optimizer state in the trace."""
    sized = is_among(facts.size, np.array(sorted(trained), np.int64))
    made = multiset(facts.size[(draft.category == Category.OPTIMIZER_STATE.code) & ~facts.ghost & sized])
    copies = {made[s] / c for s, c in trained.items()}
    return bool(made) and len(copies) > 1


def _fill_copies(
    facts: AllocationFacts,
    draft: Draft,
    rows: Ints,
    sizes: dict[int, int],
    roles: list[Category],
    *,
    exact: bool = False,
) -> None:
    mine = rows[is_among(facts.size[rows], np.array(sorted(sizes), np.int64))]
    mine = _oldest_first(facts, mine, roles)
    if roles and roles[0] is Category.ADAPTERS:
        # Some sizes are shared with the base model. Adapters were added to a finished model, so they come after it.
        ahead = rank_in_size(facts.size[mine][::-1])[::-1]
        mine = mine[ahead < np.array([sizes[int(s)] * len(roles) for s in facts.size[mine]], np.int64)]
    if not len(mine) or not roles:
        return
    have = multiset(facts.size[mine])
    rank = rank_in_size(facts.size[mine])
    # Blocks of a size beyond the number of copies belong to the first copy, as buffers do.
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
    """Return how many whole copies there are, by the median over bytes."""
    if not wanted:
        return 0
    copies = np.array([have[s] // c for s, c in wanted.items()])
    weight = np.array([s * c for s, c in wanted.items()], float)
    order = np.argsort(copies)
    return int(copies[order][np.searchsorted(np.cumsum(weight[order]), weight.sum() / 2)])


def _is_small_part(facts: AllocationFacts, draft: Draft, trained: Counter[int]) -> bool:
    """Tell whether the trained part is small compared with all older blocks: adapters, not the model.

    Blocks of cuBLAS and of an inference engine don't count. Layers with an embedding are a whole model, however large
    other models are.
    """
    if is_language_model(trained):
        return False
    engine = np.isin(draft.category, [Category.KV_CACHE.code, Category.INFERENCE_ENGINE.code])
    kept = facts.ghost & facts.survivor & ~is_among(facts.size, WORKSPACE_BYTES) & ~engine
    return sum(s * c for s, c in trained.items()) < 0.15 * int(facts.size[kept].sum())


def _state_is_older(facts: AllocationFacts, draft: Draft) -> bool:
    """Tell whether the optimizer's state is older than the history: no step in the history makes any."""
    made = (draft.category == Category.OPTIMIZER_STATE.code) & ~facts.ghost
    return int(facts.size[made].sum()) < 0.1 * int(facts.size[draft.category == Category.GRADIENTS.code].sum())


def whole_models(facts: AllocationFacts, draft: Draft) -> None:
    """Decide equal copies of a model where no gradient was ever seen, by how often each size occurs.

    Blocks with the Python stack of their birth are left out: if they were optimizer state or gradients, the stack
    would have decided them.
    """
    told = facts.stacks.has_python[facts.timeline.stack]
    rows = np.flatnonzero(facts.ghost & draft.open & (facts.size >= 512) & ~told)
    sizes = multiset(facts.size[rows])
    copies = _equal_models(sizes)
    if copies > 1:
        whole_sizes = {s: c // copies for s, c in sizes.items() if c >= copies}
        roles = _roles_without_gradients(facts, copies, _accumulates(facts, draft, whole_sizes))
        _fill_copies(facts, draft, rows, whole_sizes, roles)


def _equal_models(sizes: Counter[int]) -> int:
    """Count the whole copies of one model in a multiset of sizes; 1 where it is not sure that there are more.

    One model has an odd number of norms (two per layer and a final one). So a model stands several times where every
    repeated size divides, embeddings and head included. Matrices that come in pairs or fours a layer divide without a
    second model. Three copies and more may have a norm's size of another origin beside them.
    """
    small = {s: c for s, c in sizes.items() if s <= 1 << 17}
    if len(sizes) < 4 or not small:
        return 1
    norm, norms = max(small.items(), key=lambda item: item[1])
    alone = {s: c for s, c in sizes.items() if s >= 1 << 20 and c <= norms / 4}
    repeated = [c for s, c in sizes.items() if c >= 4 and s >= NOTICEABLE]
    total, total_alone = (sum(s * c for s, c in of.items()) for of in (sizes, alone))
    for copies, stray in ((5, 0), (4, 0), (3, 0), (2, 0), (5, 2), (4, 2), (3, 2)):
        whole = sum(s * c for s, c in sizes.items() if c % copies == 0 or s == norm)
        apart = sum(s * c for s, c in alone.items() if c % copies == 0)
        divides = norms % copies <= stray and (stray > 0 or not any(c % copies for c in repeated))
        if divides and norms >= 4 * copies and whole >= 0.95 * total and apart >= 0.8 * total_alone > 0:
            return copies
    return 1


def _accumulates(facts: AllocationFacts, draft: Draft, sizes: Mapping[int, int]) -> bool:
    """Tell whether the gradients are older than the history: a backward makes none and adds to those there are.

    A backward that the history sees the end of would have left new ones. In one that it does not see the end of,
    what is added to a gradient has the parameter's size, is born there and dies there (``sizes``: how many of each).
    """
    wanted = sum(s * c for s, c in sizes.items())
    # The last of what is added may be alive where the history ends.
    kept = (draft.category == Category.GRADIENTS.code) & ((facts.death != Phase.BACKWARD.code) | facts.survivor)
    if int(facts.size[kept].sum()) > max(sizes, default=0):
        return False
    spans = facts.spans_of(Phase.BACKWARD)
    if any(end < facts.timeline.n_events for _, end in spans):
        return True
    born = facts.born_in(spans[-1]) if spans else np.zeros(0, np.int64)
    added = multiset(facts.size[born[~facts.survivor[born] & ~facts.module[born]]])
    return sum(s * min(c, added[s]) for s, c in sizes.items()) > 0.5 * wanted


def _roles_without_gradients(facts: AllocationFacts, copies: int, accumulates: bool) -> list[Category]:
    """Return the roles of equal copies where no gradient is born in the trace."""
    refers = facts.has_phase(Phase.REFERENCE_LOGPROBS)
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


_PASSES = codes_of(Phase.FORWARD, Phase.OLD_LOGPROBS, Phase.REFERENCE_LOGPROBS, Phase.EVALUATE, Phase.REWARD)
_NO_GRAD = codes_of(Phase.OLD_LOGPROBS, Phase.REFERENCE_LOGPROBS, Phase.REWARD, Phase.EVALUATE)


def apply_ghosts(facts: AllocationFacts, draft: Draft, trained: Counter[int], parameters: Counter[int]) -> None:
    """Decide the ghosts that are still open."""
    if not (facts.ghost & draft.open).any():
        return
    _by_death(facts, draft, trained, parameters)
    _workspaces(facts, draft, trained)
    # Blocks keep the stack of their birth: what a module's forward made is no weight.
    made = facts.ghost & draft.open & facts.module & facts.stacks.has_python[facts.timeline.stack]
    draft.decide(made, Category.ACTIVATIONS, "ghost.made-in-forward")
    _previous_graph(facts, draft)
    if trained:
        copies_of_trained(facts, draft, trained)
    else:
        whole_models(facts, draft)
    _another_model(facts, draft, trained)
    if ((draft.category == Category.WEIGHTS.code) & (draft.evidence == Evidence.OWNER.code)).any():
        return  # the recording named every parameter, so other ghosts are no parameters, and nothing else is known
    rest = facts.ghost & draft.open
    sizes = facts.size
    # What the program frees while it goes on working is no weight that its passes read.
    lasting = facts.survivor
    draft.decide(rest & lasting & (sizes < _SMALL), Category.WEIGHTS, "ghost.small")
    draft.decide(rest & lasting, Category.WEIGHTS, "ghost.base-weights")


def _previous_graph(facts: AllocationFacts, draft: Draft) -> None:
    """Decide what an earlier pass saved, which a name held until the next pass returned.

    It is freed in the recording, while the model stays, and the recording's own passes make blocks of the same sizes.
    Where blocks that stay have such a size too, nearly all that is freed must look like that.
    """
    t = facts.timeline
    passes = facts.module & ~facts.ghost & np.isin(facts.phase, _PASSES)
    stays = facts.ghost & (t.free_event >= t.n_events)
    freed = facts.ghost & draft.open & ~stays & (facts.size >= _SMALL)
    # An optimizer's step and zero_grad free state and gradients.
    freed[freed] = facts.track.phase[t.free_event[freed]] != Phase.OPTIMIZER_STEP.code
    alike = freed & is_among(facts.size, distinct(facts.size[passes]))
    if int(facts.size[alike].sum()) < _NEARLY_ALL * int(facts.size[freed].sum()):
        alike &= ~is_among(facts.size, distinct(facts.size[stays]))
    if stays.any():
        draft.decide(alike, Category.ACTIVATIONS, "ghost.previous-graph")


def apply_ghost_gradients(facts: AllocationFacts, draft: Draft) -> None:
    """Decide ghosts that ``zero_grad`` frees: they were gradients."""
    zeroed = facts.ghost & ~facts.survivor & facts.freed_by(("*:zero_grad",))
    draft.decide(zeroed, Category.GRADIENTS, "ghost.freed-by-zero-grad")


def _by_death(facts: AllocationFacts, draft: Draft, trained: Counter[int], parameters: Counter[int]) -> None:
    """Decide, in a history that begins in the middle of work, ghosts by the phase they die in."""
    dead = facts.ghost & draft.open & ~facts.survivor
    if not dead.any():
        return
    sized = is_among(facts.size, np.array(sorted(trained), np.int64))
    step = facts.death == Phase.OPTIMIZER_STEP.code
    if trained:
        _replaced_state(facts, draft, trained, dead & step & sized)
    draft.decide(dead & step & sized, Category.GRADIENTS, "ghost.dies-in-optimizer")
    draft.decide(dead & step, Category.TEMPORARIES, "ghost.dies-in-optimizer")
    if (draft.category == Category.WEIGHT_CASTS.code).any():
        halves = np.array(sorted(s // 2 for s in parameters if s >= _SMALL), np.int64)
        cast = dead & is_among(facts.size, halves)
        draft.decide(cast, Category.WEIGHT_CASTS, "ghost.weight-copy")
    forward_or_back = np.isin(facts.death, codes_of(Phase.BACKWARD, Phase.FORWARD))
    opens = _opening_phase(facts)
    in_training = opens in codes_of(Phase.FORWARD, Phase.BACKWARD)
    if in_training and not facts.has_phase(Phase.BACKWARD):
        draft.decide(dead & (facts.death == opens), Category.ACTIVATIONS, "ghost.previous-graph")
    elif in_training:
        draft.decide(dead & forward_or_back, Category.ACTIVATIONS, "ghost.dies-in-backward")
    if opens == Phase.GENERATE.code:
        large = _repeated(facts, dead, 6)
        draft.decide(dead & (facts.death == opens) & large, Category.KV_CACHE, "ghost.dies-in-generate")
        draft.decide(dead & (facts.death == opens), Category.ACTIVATIONS, "ghost.dies-in-generate")
    if opens in _NO_GRAD:
        draft.decide(dead & (facts.death == opens), Category.ACTIVATIONS, "ghost.dies-in-its-phase")
    small = facts.size < 1 << 20
    draft.decide(dead & small, Category.INPUTS, "ghost.dies-later")


def replaced_by_step(facts: AllocationFacts) -> Counter[int]:
    """Count the sizes of the state that an optimizer step makes anew, where as much is freed as stays; else none.

    Where every size is freed an even number of times there are two moments, and what is odd is a temporary.
    """
    born = np.concatenate([facts.born_in(s) for s in facts.spans_of(Phase.OPTIMIZER_STEP)] or [np.zeros(0, np.int64)])
    freed = multiset(facts.size[_freed_by_step(facts)])
    made = multiset(facts.size[born[facts.survivor[born]]])
    total = sum(s * c for s, c in freed.items())
    if not total or sum(s * c for s, c in (freed & made).items()) < 0.8 * total:
        return Counter()
    moments = 1 if any(c % 2 for c in freed.values()) else 2
    return Counter({s: made[s] // moments * moments for s in freed})


def _freed_by_step(facts: AllocationFacts) -> Bools:
    freed: Bools = facts.ghost & (facts.death == Phase.OPTIMIZER_STEP.code) & ~facts.survivor & (facts.size >= 512)
    return freed


def _replaced_state(facts: AllocationFacts, draft: Draft, trained: Counter[int], freed: Bools) -> None:
    """Decide the state that a step frees and replaces, except what the program's own variables still hold."""
    replaced = replaced_by_step(facts)
    if not replaced and not _gradients_are_new(facts, draft, trained):
        return
    draft.fill(freed, Category.OPTIMIZER_STATE, Evidence.LIFETIME, "ghost.replaced-by-optimizer",
               alternatives=(Category.GRADIENTS,))  # fmt: skip
    for size, count in replaced.items():
        same = np.flatnonzero(facts.ghost & facts.survivor & draft.open & (facts.size == size))
        held = same[np.argsort(facts.timeline.address[same], kind="stable")][2 * trained[size] :]
        draft.fill(held[: max(count - int((facts.size[freed] == size).sum()), 0)], Category.OPTIMIZER_STATE,
                   Evidence.LIFETIME, "ghost.replaced-by-optimizer", alternatives=(Category.WEIGHTS,))  # fmt: skip


def _gradients_are_new(facts: AllocationFacts, draft: Draft, trained: Counter[int]) -> bool:
    born = multiset(facts.size[(draft.category == Category.GRADIENTS.code) & ~facts.ghost])
    wanted = sum(s * c for s, c in trained.items())
    return sum(s * c for s, c in (born & trained).items()) >= 0.5 * wanted


def _opening_phase(facts: AllocationFacts) -> int:
    spans = facts.track.spans
    return next((p.code for s in spans for p in Phase if s.phase == p.value and s.phase != "other"), -1)


def _repeated(facts: AllocationFacts, among: Bools, times: int) -> Bools:
    values, counts = np.unique(facts.size[among], return_counts=True)
    return is_among(facts.size, values[counts >= times])


def _workspaces(facts: AllocationFacts, draft: Draft, trained: Counter[int]) -> None:
    rows = np.flatnonzero(facts.ghost & draft.open & is_among(facts.size, WORKSPACE_BYTES))
    if not len(rows):
        return
    others = facts.ghost & draft.open & (facts.size >= 1 << 20) & ~is_among(facts.size, WORKSPACE_BYTES)
    counts = [c for c in multiset(facts.size[others]).values() if c >= 8]
    layers = int(np.gcd.reduce(np.array(counts))) if counts else 0
    for size in distinct(facts.size[rows]):
        same = rows[facts.size[rows] == size]
        same = same[np.argsort(facts.timeline.address[same], kind="stable")]
        spare = _spare(len(same), trained[int(size)], layers)
        draft.fill(same[len(same) - spare :], Category.WORKSPACE, Evidence.FINGERPRINT, "workspace.exact-size",
                   alternatives=(Category.WEIGHTS,))  # fmt: skip


def _spare(count: int, trained: int, layers: int) -> int:
    """Count those of ``count`` equal blocks that are no parameters: the rest beyond whole copies or whole layers."""
    if trained:
        return count % trained if count % trained <= 4 else 0
    if count <= 4:
        return count
    for unit in (layers, layers // 2):
        if unit >= 4 and 0 < count % unit <= 2:
            return count % unit
    return 0


def _another_model(facts: AllocationFacts, draft: Draft, trained: Counter[int]) -> None:
    """Decide the ghosts beyond whole copies of the policy: if they are many, they are a model of other sizes."""
    kept = np.flatnonzero(facts.ghost & draft.open & facts.survivor)
    left = kept[facts.size[kept] >= _SMALL]
    policy = int(facts.size[facts.ghost & (draft.category == Category.WEIGHTS.code)].sum())
    known = known_copies(facts, draft, trained)
    whole = Category.WEIGHTS in known
    if not len(left) or (whole and int(facts.size[left].sum()) <= 0.05 * policy):
        return
    scores = bool((facts.module & (facts.phase == Phase.REWARD.code)).any())
    refers = facts.has_phase(Phase.REFERENCE_LOGPROBS) and whole and Category.REFERENCE_MODEL not in known
    if scores or refers:
        role = Category.REWARD_MODEL if scores else Category.REFERENCE_MODEL
        rule = "ghost.model-of-other-sizes" if whole else "ghost.second-model"
        beside = left if whole else _upper_model(facts, left)
        draft.fill(beside, role, Evidence.FINGERPRINT, rule, alternatives=(Category.WEIGHTS,))
    elif trained:
        _idle_model(facts, draft, kept[facts.size[kept] >= NOTICEABLE], trained, whole=whole)


def _idle_model(facts: AllocationFacts, draft: Draft, rows: Ints, trained: Counter[int], *, whole: bool) -> None:
    """Decide a whole model of other sizes beside the policy that nothing in the history runs."""
    beside = rows if whole else _upper_model(facts, rows)
    of_policy = multiset(facts.size[np.setdiff1d(rows, beside)])
    if _of_other_sizes(multiset(facts.size[beside]), trained) and (whole or is_language_model(of_policy)):
        draft.fill(beside, Category.REWARD_MODEL, Evidence.FINGERPRINT, "ghost.model-never-runs",
                   alternatives=NEVER_RUNS)  # fmt: skip


def _of_other_sizes(sizes: Counter[int], trained: Counter[int]) -> bool:
    """Tell whether these are a whole model that is no copy of the trained sizes, in their dtype or another."""
    copies = {int(s * factor) for s in trained for factor in (0.25, 0.5, 1, 2, 4)}
    shared = sum(s * c for s, c in sizes.items() if s in copies)
    return is_language_model(sizes) and shared < 0.5 * sum(s * c for s, c in sizes.items())


def _upper_model(facts: AllocationFacts, rows: Ints) -> Ints:
    """Return the upper rows of an address range that holds two models of different sizes; none if it holds one.

    A model's layers repeat its sizes over its whole range. Between two models there is an address that
    (nearly) no size occurs on both sides of, with several repeated sizes on either side.
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
    for cut in distinct(first[repeated]):
        straddling = float(bytes_of[(first < cut) & (last >= cut)].sum())
        below, above = (repeated & (last < cut)).sum(), (repeated & (first >= cut)).sum()
        if below >= 3 and above >= 3 and straddling <= best:
            best, where = straddling, int(cut)
    if where < 0:
        return rows[:0]
    # The upper model's embedding lies alone below its first layer.
    while where > 0 and counts[inverse[where - 1]] <= 2 and sizes[where - 1] > sizes[where:].mean():
        where -= 1
    return rows[where:]
