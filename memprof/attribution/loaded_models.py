"""Tell which loaded model is the policy, its adapters, the reference, a reward model or a critic.

A stack shows that a tensor is some model's parameter, but seldom which model's. The set of all models
decides. The model whose sizes have gradients is the policy. If only a small part of it is trained, that part
is the adapters. A second model with exactly the policy's sizes is the reference. Another model is a reward
model if the reward phase runs modules, and so on. Models are told apart by the program's own frames in their
stacks, and by the order of birth where those are equal (a loader's worker threads).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memprof.attribution.call_sites import call_site
from memprof.attribution.facts import AllocationFacts, Bools, Draft, Ints, multiset
from memprof.snapshot.model import distinct, is_among
from memprof.vocabulary import Category, Evidence, Phase

NOTICEABLE = 1024  # bytes; smaller tensors (buffers, scales, counters) do not tell models apart
_SAME = 0.9  # two models with this share of bytes in common have the same architecture
NEVER_RUNS = (Category.VALUE_MODEL, Category.REFERENCE_MODEL, Category.WEIGHTS)  # beside reward, what it may be
_SMALLEST_VOCABULARY = 30_000  # the matrices between a vision tower and its language model have fewer rows
_OF_REINFORCEMENT = (Phase.GENERATE, Phase.REWARD, Phase.OLD_LOGPROBS, Phase.REFERENCE_LOGPROBS)
_MINOR = 0.02  # a group of at most this share of the policy is part of it (buffers, late parameters)
_SMALL_PART = 0.3  # who trains less than this share of a model trains adapters
_OWN_CONSTRUCTOR = "fused.parameter-init"  # the rule of a class of the program's own
_FEW = 4  # a constructor's line that makes fewer tensors makes no model: an embedding or a head


@dataclass
class LoadedModel:
    """Hold the rows that one call site loaded, in order of birth.

    Args:
        rows: the rows.
        sizes: how many of them have each size in bytes.
        role: what the model is, once it is known.
        never_runs: whether nothing in the history runs it.
        alternatives: what else it may be, where only its sizes and the order of birth tell it from another.
    """

    rows: Ints
    sizes: Counter[int]
    role: Category | None = None
    never_runs: bool = False
    alternatives: tuple[Category, ...] = ()

    @property
    def bytes(self) -> int:
        """Return the total bytes of ``sizes``."""
        return sum(s * c for s, c in self.sizes.items())


def apply_loaded_models(
    facts: AllocationFacts, draft: Draft, matched: NDArray[np.int64], trained: Counter[int]
) -> None:
    """Decide the rows whose stack rule has ``role = "resolve"``.

    ``matched`` holds the rule's index for each such row and -1 elsewhere. ``trained`` is the multiset of
    gradient sizes in bytes, empty where the history has no backward.
    """
    rows = np.flatnonzero((matched >= 0) & draft.open)
    if not len(rows):
        return
    rows = _without_scratch(facts, draft, rows)
    lasting = rows[facts.timeline.free_event[rows] > facts.first_run]
    models = _models(facts, lasting, trained)
    _assign_roles(facts, draft, models, trained)
    # What is gone before anything runs was replaced: by a tied head, another dtype, loaded values. No model has it.
    models.append(LoadedModel(rows[facts.timeline.free_event[rows] <= facts.first_run], Counter(), Category.WEIGHTS))
    beside = beside_models(facts, trained)
    rules, reinforced = facts.stacks.rules.rules, any(map(facts.has_phase, _OF_REINFORCEMENT))
    for model in models:
        own = all(rules[int(index)].name == _OWN_CONSTRUCTOR for index in distinct(matched[model.rows]))
        layers = max((c for s, c in model.sizes.items() if s >= NOTICEABLE), default=0)
        if own and layers < _FEW and model.role in (None, Category.WEIGHTS) and beside[model.rows].all():
            draft.decide(model.rows, Category.INPUTS, "constructor.of-data")
        role = model.role or Category.WEIGHTS
        adapters = _adapters_in(facts, model, trained) if role is Category.WEIGHTS else model.rows[:0]
        draft.decide(model.rows if role is Category.ADAPTERS else adapters, Category.ADAPTERS, "models.trained-part")
        has_gradients = _common(model.sizes, trained) >= _SAME * model.bytes
        if model.never_runs:
            draft.fill(model.rows, role, Evidence.FINGERPRINT, "models.never-runs", alternatives=NEVER_RUNS)
        for index in distinct(matched[model.rows]):
            mine = model.rows[matched[model.rows] == index]
            others = model.alternatives or (() if role is Category.WEIGHTS else (Category.WEIGHTS,))
            # Gradients of their sizes show that these are parameters, where the stack alone leaves it open.
            others += () if has_gradients else tuple(map(Category, rules[int(index)].alternatives))
            # Blocks older than the history have no order: a critic made by the same line can't be told from the policy.
            others += (Category.VALUE_MODEL,) if reinforced and facts.ghost[mine].any() else ()
            draft.fill(mine, role, Evidence.STACK, rules[int(index)].name, alternatives=dict.fromkeys(others))


def beside_models(facts: AllocationFacts, trained: Counter[int]) -> Bools:
    """Flag rows of calls that make no trained parameter: a buffer of experiences is made by a call of its own.

    The call of the outermost constructor counts. Without gradients nothing is known of any, and where only adapters
    are trained the frozen model is made by such calls too.
    """
    call = call_site(facts.stacks, ("*:__init__",))[facts.timeline.stack]
    sizes = np.array([s for s in sorted(trained) if s >= NOTICEABLE], np.int64)
    made = is_among(facts.size, sizes) & np.isin(facts.phase, (Phase.LOAD.code, Phase.OTHER.code)) & ~facts.module
    beside = ~is_among(call, distinct(call[made])) & facts.stacks.has_python[facts.timeline.stack]
    lasting = int(facts.size[beside & facts.survivor & (facts.timeline.alloc_event < facts.first_run)].sum())
    total = sum(s * c for s, c in trained.items())
    return beside & (total > _SMALL_PART * (total + lasting))


def _without_scratch(facts: AllocationFacts, draft: Draft, rows: Ints) -> Ints:
    """Decide the loader's scratch (freed before the third next tensor is born) and return the other rows."""
    t = facts.timeline
    births = np.sort(t.alloc_event[rows])
    age = np.searchsorted(births, t.free_event[rows]) - np.searchsorted(births, t.alloc_event[rows])
    scratch = (age <= 3) & ~facts.survivor[rows] & (facts.death[rows] == Phase.LOAD.code)
    draft.decide(rows[scratch], Category.TEMPORARIES, "models.loading-scratch")
    kept: Ints = rows[~scratch]
    kept = kept[np.argsort(t.alloc_event[kept], kind="stable")]
    return kept


def _models(facts: AllocationFacts, rows: Ints, trained: Counter[int]) -> list[LoadedModel]:
    keys = _builders(facts, rows, trained)
    _, first = np.unique(keys, return_index=True)
    models = []
    for key in keys[np.sort(first)]:
        for one in _split_widths(facts, rows[keys == key], trained):
            for part in _split_copies(facts, one, trained):
                models.append(LoadedModel(part, multiset(facts.size[part])))
    return [m for m in models if len(m.rows)]


def _builders(facts: AllocationFacts, rows: Ints, trained: Counter[int]) -> Ints:
    """Number the rows by the call that built their model.

    A constructor makes the parts of a model at many lines, so what calls the outermost constructor counts. Where one
    such call makes more than the trained parameters (a trainer's constructor builds several models), its lines count,
    unless one of them makes a part alone: an embedding or a head.
    """
    stack = facts.timeline.stack[rows]
    outer, inner = facts.stacks.builder_keys()
    keys = outer[stack]
    wanted = sum(s * c for s, c in trained.items())
    for key in distinct(keys):
        mine = keys == key
        lines, sizes = inner[stack[mine]], facts.size[rows[mine]]
        total = int(sizes.sum())
        alone = ((lines == line) & (sizes >= NOTICEABLE) for line in distinct(lines))
        parts = any(one.sum() < _FEW and sizes[one].sum() > _MINOR * total for one in alone)
        if total > (1 + _MINOR) * wanted > 0 and not parts:
            keys[mine] = lines
    return keys


def _split_widths(facts: AllocationFacts, rows: Ints, trained: Counter[int]) -> list[Ints]:
    """Split two language models of different widths that one line makes: two embeddings of one vocabulary."""
    # Where no order of birth is known, what is trained stands apart.
    last_born = facts.ghost[rows] & is_among(facts.size[rows], np.array(sorted(trained), np.int64))
    rows = rows[np.argsort(last_born, kind="stable")]
    sizes = np.where(facts.size[rows] >= NOTICEABLE, facts.size[rows], 0)
    values, place = np.unique(sizes, return_inverse=True)
    first, last = np.full(len(values), len(rows)), np.zeros(len(values), np.int64)
    np.minimum.at(first, place, np.arange(len(rows)))
    np.maximum.at(last, place, np.arange(len(rows)))
    straddling = np.zeros(len(rows) + 1, np.int64)
    np.add.at(straddling, first[values > 0] + 1, 1)
    np.add.at(straddling, last[values > 0] + 1, -1)
    for cut in np.flatnonzero(np.cumsum(straddling)[1:-1] == 0) + 1 if len(rows) else ():
        below, above = (embedding_geometry(multiset(facts.size[part]))[0] for part in (rows[:cut], rows[cut:]))
        if below == above > 0:
            return [rows[:cut], rows[cut:]]
    return [rows]


def _split_copies(facts: AllocationFacts, rows: Ints, trained: Counter[int]) -> list[Ints]:
    """Split several models of one architecture behind the same caller: the first row of each size is the first's."""
    sizes = multiset(facts.size[rows])
    large = {s: c for s, c in sizes.items() if s >= NOTICEABLE}
    copies = _copies(facts.size[rows], large, trained)
    if copies < 2:
        return [rows]
    rank = rank_in_size(facts.size[rows])
    share = np.array([max(sizes[int(s)] // copies, 1) for s in facts.size[rows]])
    which = np.minimum(rank // share, copies - 1)
    return [rows[which == k] for k in range(copies)]


def _copies(in_order: Ints, large: dict[int, int], trained: Counter[int]) -> int:
    """Count the equal models in sizes, by what is trained; else by their order, as one is made after the other."""
    total = sum(s * c for s, c in large.items())
    common = {s: c for s, c in large.items() if trained.get(s, 0)}
    if total and sum(s * c for s, c in common.items()) >= _SAME * total:
        return max(min(c // trained[s] for s, c in common.items()), 1)
    counts = np.array(list(large.values()), np.int64)
    divisor = int(np.gcd.reduce(counts)) if len(counts) > 3 else 1
    parts = np.split(in_order[in_order >= NOTICEABLE], divisor) if 2 <= divisor <= 4 else []
    return divisor if parts and all(np.array_equal(part, parts[0]) for part in parts) else 1


def rank_in_size(sizes: Ints) -> Ints:
    """Count for each entry the equal entries before it."""
    order = np.argsort(sizes, kind="stable")
    ordered = sizes[order]
    start = np.r_[0, np.flatnonzero(np.diff(ordered)) + 1] if len(ordered) else np.zeros(0, np.int64)
    rank = np.empty(len(sizes), np.int64)
    rank[order] = np.arange(len(sizes)) - np.repeat(start, np.diff(np.r_[start, len(sizes)]))
    return rank


def _assign_roles(facts: AllocationFacts, draft: Draft, models: list[LoadedModel], trained: Counter[int]) -> None:
    named = {
        Category.REWARD_MODEL: facts.stacks.any_of("reward_model"),
        Category.REFERENCE_MODEL: facts.stacks.any_of("reference_model"),
        Category.VALUE_MODEL: facts.stacks.any_of("value_model"),
    }
    for model in models:
        stacks = facts.timeline.stack[model.rows]
        for role, hits in named.items():
            if hits[stacks].mean() > 0.5:
                model.role = role
    policy = _older_policy(facts, draft, models, trained) or _policy(models, trained)
    if policy is None:
        return
    policy.role = Category.WEIGHTS
    others = [m for m in models if m.role is None]
    for model in others:
        if _noticeable(model.sizes) == _noticeable(policy.sizes):
            policy.alternatives, model.alternatives = (Category.REFERENCE_MODEL,), (Category.WEIGHTS,)
    _trained_beside(facts, policy, others, trained)
    rewarded = bool((facts.module & (facts.phase == Phase.REWARD.code)).any())
    for model in others:
        if model.role is None:
            model.role = _role_beside(facts, model, policy, models, trained, rewarded)
        if model.role is Category.WEIGHTS and model.bytes > _MINOR * policy.bytes and not model.alternatives:
            model.alternatives = (Category.REFERENCE_MODEL, Category.REWARD_MODEL)


def _older_policy(
    facts: AllocationFacts, draft: Draft, models: list[LoadedModel], trained: Counter[int]
) -> LoadedModel | None:
    """Return the trained model where it is older than the history: what is loaded or copied later is beside it."""
    unseen = facts.ghost & draft.open & ~facts.stacks.has_python[facts.timeline.stack]
    older = multiset(facts.size[unseen]) & trained
    if _common(older, trained) < _SAME * sum(s * c for s, c in trained.items()) or not trained:
        return None
    births, copied = facts.timeline.alloc_event, facts.stacks.count(("copy.py:deepcopy",)) > 0
    backwards = facts.spans_of(Phase.BACKWARD)
    first = backwards[0][0] if backwards else facts.timeline.n_events
    for model in models:
        is_copy = copied[facts.timeline.stack[model.rows]].mean() > 0.5
        covers = _common(model.sizes, trained) >= _SAME * sum(s * c for s, c in trained.items())
        if covers and not is_copy and births[model.rows].min() < first:
            return None
    return LoadedModel(np.zeros(0, np.int64), older)


def _trained_beside(
    facts: AllocationFacts, policy: LoadedModel, others: list[LoadedModel], trained: Counter[int]
) -> None:
    """Give the models that gradients beyond the policy's belong to their role: a critic, or a part of the model.

    A critic has a head of its own, and may train a part of itself: then it alone has all those sizes.
    """
    left = trained - policy.sizes
    for _ in others:
        model = max((m for m in others if m.role is None), key=lambda m: _common(m.sizes, left))
        # Vectors are alike in all models of one width.
        if not _common(model.sizes, left) >= _SAME * model.bytes > _MINOR * policy.bytes:
            break
        model.role, model.alternatives = _beside_in_training(facts), (Category.REFERENCE_MODEL,)
        left = left - model.sizes
    total = sum(s * c for s, c in left.items())
    fitting = [
        m
        for m in others
        if m.role is None
        and _common(m.sizes, left) >= _SAME * total > 0
        and m.bytes > _MINOR * policy.bytes
        and _noticeable(m.sizes) != _noticeable(policy.sizes)
    ]
    if fitting:
        max(fitting, key=lambda m: _common(m.sizes, left)).role = _beside_in_training(facts)


def _beside_in_training(facts: AllocationFacts) -> Category:
    """Return what a model trained beside the policy is.

    A critic judges what was generated. In any other training, a part made at another line is the model's own.
    """
    return Category.VALUE_MODEL if any(map(facts.has_phase, _OF_REINFORCEMENT)) else Category.WEIGHTS


def _policy(models: list[LoadedModel], trained: Counter[int]) -> LoadedModel | None:
    free = [m for m in models if m.role is None]
    if not free:
        return None
    largest = max(m.bytes for m in free)
    wanted = sum(s * c for s, c in trained.items())
    for model in free:
        if wanted and _common(model.sizes, trained) >= _SAME * wanted:
            base = next((m for m in free if _adapts(model, m)), None)
            if base is None:
                return model
            model.role = Category.ADAPTERS
            return base
    # Several models are trained, or a part of one. A policy has a copy as its reference, a critic a head of its own.
    covered = [m for m in free if _common(m.sizes, trained) >= _SAME * m.bytes and m.bytes >= 0.2 * largest]
    shapes = [_noticeable(m.sizes) for m in free]
    if covered:
        return next((m for m in covered if shapes.count(_noticeable(m.sizes)) > 1), covered[0])
    # Where adapters were made elsewhere or no backward was seen, the first model of some size is the policy.
    return next(m for m in free if m.bytes >= 0.2 * largest)


def _adapts(model: LoadedModel, base: LoadedModel) -> bool:
    """Tell whether trained matrices that were made apart adapt an older model: many, small, and no embedding."""
    many = sum(model.sizes.values()) >= 2 * _FEW and embedding_geometry(model.sizes) == (0, 0)
    older = bool(len(base.rows)) and base.rows.min() < model.rows.min()
    return many and older and model.bytes < _SMALL_PART * base.bytes


def _role_beside(
    facts: AllocationFacts,
    model: LoadedModel,
    policy: LoadedModel,
    models: list[LoadedModel],
    trained: Counter[int],
    rewarded: bool,
) -> Category:
    if model.bytes <= _MINOR * policy.bytes:
        return Category.WEIGHTS
    same = _noticeable(model.sizes) == _noticeable(
        policy.sizes - trained if _is_lora(policy, trained) else policy.sizes
    )
    same = same or _noticeable(model.sizes) == _noticeable(policy.sizes)
    # An encoder's sizes are all among its decoder's: a copy has nearly all of the policy's too.
    alike = _common(model.sizes, policy.sizes) >= _SAME * model.bytes > 0
    is_copy = alike and model.bytes >= _SAME * policy.bytes
    taken = any(m.role is Category.REFERENCE_MODEL for m in models)
    if same and not (taken and rewarded):
        return Category.REFERENCE_MODEL
    if rewarded:
        needs_reference = facts.has_phase(Phase.REFERENCE_LOGPROBS) and not taken and is_copy
        exact = [
            m
            for m in models
            if m is not policy and m.role is None and _noticeable(m.sizes) == _noticeable(policy.sizes)
        ]
        return Category.REFERENCE_MODEL if needs_reference and not exact else Category.REWARD_MODEL
    if trained and _common(model.sizes, trained) >= 0.5 * model.bytes and not alike:
        return _beside_in_training(facts)
    copied = any(_noticeable(m.sizes) == _noticeable(policy.sizes) for m in models if m is not policy)
    # With adapters the reference is the policy itself, adapters off. What else was loaded is a part of the policy:
    # peft's preparation for 4-bit training makes embeddings, head and norms anew in fp32, half of the bytes.
    if not copied and (is_copy or (facts.has_phase(Phase.REFERENCE_LOGPROBS) and not _is_lora(policy, trained))):
        return Category.REFERENCE_MODEL
    if alike and copied and any(map(facts.has_phase, _OF_REINFORCEMENT)):
        model.alternatives = (Category.VALUE_MODEL, Category.REFERENCE_MODEL)
        return Category.REWARD_MODEL
    reinforced = any(map(facts.has_phase, _OF_REINFORCEMENT))
    words = embedding_geometry(model.sizes)[0]
    if trained and not reinforced and 0 < words == embedding_geometry(policy.sizes)[0] and not copied:
        model.alternatives = (Category.REWARD_MODEL, Category.WEIGHTS)  # a teacher, of another size than its student
        return Category.REFERENCE_MODEL
    seen = bool(trained) or reinforced
    model.never_runs = seen and is_language_model(model.sizes)
    return Category.REWARD_MODEL if model.never_runs else Category.WEIGHTS


def _is_lora(policy: LoadedModel, trained: Counter[int]) -> bool:
    wanted = sum(s * c for s, c in trained.items())
    return bool(wanted) and wanted < _SMALL_PART * policy.bytes


def _adapters_in(facts: AllocationFacts, model: LoadedModel, trained: Counter[int]) -> Ints:
    """Return the trained rows of a policy, where only a small part is trained.

    More rows may have a trained size than there are gradients. Then rows are taken whose stack holds exactly as
    many rows of that size as there are gradients (adapters lie deeper in the module tree). Without such a stack,
    the last born are taken (adapters are added to a finished model).
    """
    none = np.zeros(0, np.int64)
    if not trained or not _is_lora(model, trained):
        return none
    stacks, sizes = facts.timeline.stack[model.rows], facts.size[model.rows]
    chosen = [none]
    for size, wanted in trained.items():
        same = model.rows[sizes == size]
        if len(same) > wanted:
            per_stack = Counter(stacks[sizes == size].tolist())
            fitting = [s for s, c in per_stack.items() if c == wanted]
            same = same[facts.timeline.stack[same] == fitting[-1]] if fitting else same[-wanted:]
        chosen.append(same)
    return np.concatenate(chosen)


def _common(a: Counter[int], b: Counter[int]) -> int:
    return sum(s * c for s, c in (a & b).items())


def _noticeable(sizes: Counter[int]) -> Counter[int]:
    return Counter({s: c for s, c in sizes.items() if s >= NOTICEABLE and c > 0})


def embedding_geometry(sizes: Counter[int]) -> tuple[int, int]:
    """Derive (vocabulary, bytes of a hidden vector) from the sizes of a model's parameters; (0, 0) if unclear.

    The most frequent small size is that of the norms' vectors. The embedding is the largest matrix that occurs
    (nearly) once. The embedding divided by a norm is the vocabulary, in any dtype.
    """
    recurrent = _recurrent_vectors(sizes)
    small = {s: c for s, c in sizes.items() if 512 <= s <= 1 << 17 and c > 1 and s not in recurrent}
    if not small and not recurrent:
        return 0, 0
    most = max(small.values(), default=0)
    hidden = [s for s, c in small.items() if c >= most / 2]
    alone = [s for s, c in sizes.items() if c <= max(most // 4, 2) and s > 1 << 20]
    for vectors in (hidden, recurrent.values()):
        for matrix in sorted(alone, reverse=True)[:3]:
            for vector in sorted(vectors, reverse=True):
                if matrix % vector == 0 and 1000 <= matrix // vector <= 1 << 20:
                    return matrix // vector, vector
    return 0, 0


def _recurrent_vectors(sizes: Counter[int]) -> dict[int, int]:
    """Return bytes of hidden vectors by those of biases: a recurrent layer's, with matrices [gates x hidden, hidden].

    An LSTM has four gates, a GRU three; the bytes of a bias and of its matrix tell both extents, in any dtype.
    """
    found = {}
    for bias, count in sizes.items():
        for gates, itemsize in ((4, 4), (3, 4), (4, 2), (3, 2)):
            hidden, rest = divmod(bias, gates * itemsize)
            # A Transformer's matrix has one bias, and its norms are vectors of their own.
            if not rest and hidden >= 64 and sizes[hidden * bias] == count > 1 and not sizes[hidden * itemsize]:
                found[bias] = hidden * itemsize
    return found


def is_language_model(sizes: Counter[int]) -> bool:
    """Tell whether a multiset of sizes is a whole language model's: repeated layers and an embedding."""
    layers = [s for s, c in sizes.items() if c >= 4 and s >= NOTICEABLE]
    return len(layers) >= 3 and embedding_geometry(sizes)[0] >= _SMALLEST_VOCABULARY
