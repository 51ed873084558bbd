"""Decide by lifetimes: caches, casts, optimizer state, workspaces, and what is made before anything runs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter

import numpy as np

from memprof.attribution.facts import AllocationFacts, Bools, Draft, Ints, codes_of, multiset
from memprof.attribution.gradients import first_workspaces, steps_lack_gradients, trained_sizes
from memprof.attribution.loaded_models import beside_models
from memprof.attribution.older_allocations import replaced_by_step
from memprof.attribution.stack_index import named_frame
from memprof.snapshot.model import distinct, is_among
from memprof.vocabulary import Category, Evidence, Phase

_COMPUTE = codes_of(
    Phase.GENERATE, Phase.OLD_LOGPROBS, Phase.REFERENCE_LOGPROBS, Phase.FORWARD, Phase.BACKWARD, Phase.REWARD,
    Phase.EVALUATE,
)  # fmt: skip
_CACHE_BYTES = 64 << 10  # equal blocks smaller than this may be token ids
_POOL_BYTES = 16 << 20  # a single block larger than this is not token ids
_NEXT_PARAMETERS = 12  # births: after so many the step works on other parameters
_BIAS_BYTES = 64 << 10
LAYERS = 3  # while a cache entry lives, the same code runs for at least so many other layers
_SMALLEST_STATE = 512
_WHOLE_SET = 0.9  # a set has at least this share of the parameters' bytes
_PART_OF_SET = 0.02  # a line that makes less than this share of the parameters' bytes is no set
_STATE_DTYPES = (1.0, 2.0, 0.5)


def apply_workspaces(facts: AllocationFacts, draft: Draft) -> None:
    """Decide cuBLAS workspaces: the first block of the exact size on each stream, if it is never freed."""
    compute = np.isin(facts.phase, _COMPUTE) & ~facts.ghost & draft.open
    backward = facts.phase == Phase.BACKWARD.code
    # A ghost made while stacks were recorded keeps its stack, in a product or in backward.
    old = facts.ghost & draft.open & ~facts.stacks.empty[facts.timeline.stack]
    for among in (compute & ~backward, compute & backward, old & facts.module, old & ~facts.module & facts.in_autograd):
        draft.fill(
            first_workspaces(facts, np.flatnonzero(among)),
            Category.WORKSPACE,
            Evidence.FINGERPRINT,
            "workspace.exact-size",
        )


def apply_weight_casts(facts: AllocationFacts, draft: Draft, parameters: Counter[int], libraries: Bools) -> None:
    """Decide autocast's 16-bit copies of a product's fp32 weight: half a parameter's size, before the output.

    The calls of one product are runs of births with one stack. The output is the last of the run, so an activation
    of the same size is not mistaken for a cast. ``libraries`` are workspaces, which belong to no run. Where recorded
    C++ frames name autocast anywhere, they must name it on these rows too.
    """
    halves = np.array(sorted(s // 2 for s in parameters if s % 2 == 0 and s >= 512), np.int64)
    order = facts.birth_order
    order = order[~libraries[order] & ~draft_is(draft, Category.WORKSPACE)[order]]
    if not len(halves) or not len(order):
        return
    # The conversions and the product of one call differ in C++ frames only.
    stack, size = facts.stacks.python_key()[facts.timeline.stack[order]], facts.size[order]
    last_of_run = np.r_[stack[1:] != stack[:-1], True]
    first_of_run = np.r_[True, last_of_run[:-1]]
    # In [input, weight, output] and [input, weight, bias, output] the first is the input's cast, unless
    # only a bias follows it.
    following = np.r_[size[1:], 0]
    input_cast = first_of_run & ~np.r_[last_of_run[1:], True] & is_among(following, halves) & (following > _BIAS_BYTES)
    last_of_run |= input_cast
    candidate = facts.module & facts.linear & is_among(facts.size, halves) & np.isin(facts.phase, _COMPUTE)
    casting = facts.stacks.any_of("autocast")
    if casting.any():
        candidate &= (casting | facts.stacks.all_python)[facts.timeline.stack]
    rows = order[~last_of_run & candidate[order]]
    draft.decide(rows, Category.WEIGHT_CASTS, "autocast.weight-copy")


def draft_is(draft: Draft, category: Category) -> Bools:
    """Flag rows decided as ``category``."""
    rows: Bools = draft.category == category.code
    return rows


def apply_optimizer_state(facts: AllocationFacts, draft: Draft, trained: Counter[int]) -> None:
    """Decide rows born in an optimizer step and alive after it: the state of any optimizer."""
    t = facts.timeline
    working = facts.spans_of(Phase.FORWARD, Phase.GENERATE)
    starts = [start for start, _ in working]
    for span in facts.spans_of(Phase.OPTIMIZER_STEP):
        if span[1] >= t.n_events:
            _unfinished_step(facts, draft, span, trained)
            continue
        # State lives past the next forward; what a step leaves for logging dies before it.
        later = bisect_left(starts, span[1])
        until = working[later][1] if later < len(working) else t.n_events - 1
        born = facts.born_in(span)
        _inherit(facts, draft, born[t.free_event[born] > until], span)
        draft.decide(born[t.free_event[born] > until], Category.OPTIMIZER_STATE, "optimizer.outlives-step")


def _inherit(facts: AllocationFacts, draft: Draft, kept: Ints, span: tuple[int, int]) -> None:
    """Give parameters that a step makes anew the category of those that it frees for them.

    ``p.data = p.data - ...`` and ``m[i] = beta * m[i] + ...`` store the new tensor, and the old one of the same size is
    freed next: in the order of their births, for each size.
    """
    t = facts.timeline
    dying = facts.freed_in(span)
    dying = dying[(t.alloc_event[dying] < span[0]) & ~facts.ghost[dying]]
    dying = dying[draft.category[dying] != Category.GRADIENTS.code]
    waiting: dict[int, list[int]] = {}
    for place, size in enumerate(facts.size[dying].tolist()):
        waiting.setdefault(size, []).append(place)
    freed, category = t.free_event[dying].tolist(), draft.category[dying].tolist()
    kept = kept[np.argsort(t.alloc_event[kept], kind="stable")]
    again: dict[int, list[int]] = {}
    for row, size, born in zip(kept.tolist(), facts.size[kept].tolist(), t.alloc_event[kept].tolist(), strict=True):
        places = waiting.get(size, [])
        first = bisect_right(places, born, key=freed.__getitem__)
        if first < len(places):
            again.setdefault(category[places.pop(first)], []).append(row)
    weights, adapters = (np.array(again.get(c.code, []), np.int64) for c in (Category.WEIGHTS, Category.ADAPTERS))
    draft.decide(weights, Category.WEIGHTS, "optimizer.replaces-parameter")
    draft.decide(adapters, Category.ADAPTERS, "optimizer.replaces-parameter")


def _unfinished_step(facts: AllocationFacts, draft: Draft, span: tuple[int, int], trained: Counter[int]) -> None:
    """Decide state where the history ends inside a step: rows of a parameter's size that live past the next ones' turn.

    Temporaries of a foreach step live that long too; their stacks name them. The last parameters see no others' turn:
    what the same lines made for them and the recording's end found alive is state too.
    """
    t = facts.timeline
    foreach = facts.stacks.count(("torch/optim/*:_multi_tensor_*", "torch/optim/*:_foreach_*")) > 0
    rows = facts.born_in(span)
    rows = rows[draft.open[rows] & ~foreach[t.stack[rows]]]
    births = np.sort(t.alloc_event[rows])
    later = len(births) - np.searchsorted(births, t.alloc_event[rows], side="right")
    sized = is_among(facts.size[rows], np.array(sorted(trained), np.int64))
    alive, stack = facts.survivor[rows] & (t.free_event[rows] >= span[1]), t.stack[rows].astype(np.int64)
    outlives = sized & alive & (later >= _NEXT_PARAMETERS)
    siblings = alive & is_among(stack, stack[outlives]) & ~is_among(stack, stack[~alive])
    # A step that replaces older state holds both for a moment: the older stands for it.
    if siblings.any() and not replaced_by_step(facts):
        outlives |= siblings
    kept = rows[outlives]
    draft.decide(kept, Category.OPTIMIZER_STATE, "optimizer.outlives-its-parameter")


def apply_kv_cache(facts: AllocationFacts, draft: Draft) -> None:
    """Decide keys and values: blocks born in generation that outlive the forward of the other layers.

    They are of two kinds. A concatenated cache is made anew for every layer at each decode step, so while one entry
    lives the same line runs for the other layers. A preallocated cache is made before the first forward and held
    through generation: several equal blocks, or one pool too large for token ids.
    """
    generating = (facts.phase == Phase.GENERATE.code) & draft.open
    rows = np.flatnonzero(generating & facts.module)
    if len(rows):
        outlives = same_stack_births(facts, rows) >= LAYERS
        # The last layers of the last step see no other layer run; they follow the majority of their stack.
        like = np.unique(
            np.stack([facts.timeline.stack[rows].astype(np.int64), facts.size[rows]]), axis=1, return_inverse=True
        )[1].reshape(-1)
        share = np.bincount(like, outlives) / np.bincount(like)
        cached = outlives | (share[like] >= 0.5)
        draft.decide(rows[cached], Category.KV_CACHE, "cache.outlives-layers")
    for span in facts.spans_of(Phase.GENERATE):
        _preallocated(facts, draft, span)


def same_stack_births(facts: AllocationFacts, rows: Ints) -> Ints:
    """Count for each row the rows of its stack that are born while it lives.

    What its own call makes in a row counts once: attention in full makes several copies of a layer's keys and values.
    Without stacks no call is known.
    """
    t = facts.timeline
    in_time = rows[np.argsort(t.alloc_event[rows], kind="stable")]
    stack = t.stack[in_time]
    call = np.zeros(len(t.stack), np.int64)
    call[in_time[1:]] = np.cumsum((stack[1:] != stack[:-1]) | (stack[1:] == 0))
    key = t.stack[rows].astype(np.int64) * (t.n_events + 2)
    births = key + t.alloc_event[rows] + 1
    by_stack = np.argsort(births, kind="stable")
    changes = np.flatnonzero(np.diff(call[rows][by_stack])) + 1
    place = np.empty(len(rows), np.int64)
    place[by_stack] = np.arange(len(rows))
    end_of_call = np.append(changes, len(rows))[np.searchsorted(changes, place, side="right")]
    last = np.searchsorted(births[by_stack], key + np.minimum(t.free_event[rows], t.n_events) + 1, side="right")
    own = np.minimum(end_of_call, last) - place - 1
    births_after: Ints = np.minimum(own, 1) + np.maximum(0, last - end_of_call)
    return births_after


def _preallocated(facts: AllocationFacts, draft: Draft, span: tuple[int, int]) -> None:
    t = facts.timeline
    rows = facts.born_in(span)
    inside = facts.module[rows]
    if not inside.any():
        return
    start = int(t.alloc_event[rows[inside]].min())
    length = span[1] - start
    held = rows[(t.alloc_event[rows] < start) & (t.free_event[rows] > start + length // 2)]
    held = held[draft.open[held]]
    sizes, counts = np.unique(facts.size[held], return_counts=True)
    repeated = sizes[((counts >= 2 * LAYERS) & (sizes >= _CACHE_BYTES)) | (sizes >= _POOL_BYTES)]
    cached = held[is_among(facts.size[held], repeated)]
    draft.decide(cached, Category.KV_CACHE, "cache.preallocated-layers")


def apply_early_parameters(facts: AllocationFacts, draft: Draft, trained: Counter[int]) -> None:
    """Decide what code that no rule knows makes before anything ran and keeps to the end.

    In a run that trains, what no call that makes parameters makes is data that its passes read.
    """
    t = facts.timeline
    early = (
        ~facts.ghost & (t.alloc_event < facts.first_run) & (t.free_event > t.n_events * 0.9) & (facts.size >= 1 << 16)
    )
    # Where no module runs, no phase shows where the first product is; a size that is no parameter's does.
    untrained = early & draft.open & ~is_among(facts.size, np.array(sorted(trained), np.int64)) & bool(trained)
    spaces = first_workspaces(facts, np.flatnonzero(untrained))
    draft.fill(spaces, Category.WORKSPACE, Evidence.FINGERPRINT, "workspace.exact-size", alternatives=[Category.INPUTS])
    draft.decide(early & ~beside_models(facts, trained), Category.WEIGHTS, "parameters.before-everything")
    draft.decide(early, Category.INPUTS, "parameters.before-everything")


def apply_made_in_forward(facts: AllocationFacts, draft: Draft, parameters: Counter[int]) -> None:
    """Decide parameters that a module's forward makes anew: an average ``b.data = m * b.data + (1 - m) * a.data``.

    One line makes blocks of several parameters' sizes that outlive an optimizer step, as no activations of a pass do.
    """
    t, ends = facts.timeline, np.array([end for _, end in facts.spans_of(Phase.OPTIMIZER_STEP)], np.int64)
    sizes = np.array([s for s in sorted(parameters) if s >= _SMALLEST_STATE], np.int64)
    rows = np.flatnonzero(draft.open & facts.module & ~facts.ghost & is_among(facts.size, sizes))
    step = np.searchsorted(ends, t.alloc_event[rows])
    rows = rows[t.free_event[rows] >= np.append(ends, t.n_events + 1)[step]]
    by_line = np.unique(np.stack([t.stack[rows].astype(np.int64), facts.size[rows]]), axis=1, return_counts=True)[0][0]
    several, counts = np.unique(by_line, return_counts=True)
    mine = rows[is_among(t.stack[rows].astype(np.int64), several[counts >= LAYERS])]
    draft.decide(mine, Category.WEIGHTS, "forward.replaces-parameter")


# -- what constructors make --------------------------------------------------------------------------------------------


def apply_early_tensors(
    facts: AllocationFacts,
    draft: Draft,
    by_stack: Bools,
    models: Bools,
    trained: Counter[int],
    parameters: Counter[int],
) -> None:
    """Decide what a program's own constructors make before anything runs: parameters, and state like them.

    A line (the innermost named frame) that makes a block for every trained parameter, size for size, makes a set of
    parameters or of state. The first such set is the model, where no other rule knows the model; an optimizer is given
    parameters that exist. A later set is the optimizer's state if a stack shows that (torch's optimizer classes, or a
    file whose other functions work between a backward and the next pass), or if the run trains and no other state is
    seen.

    Args:
        facts, draft: as for every stage.
        by_stack: rows that stack rules know; ``models``: those that they know as parameters.
        trained: how many trained parameters have each size in bytes, empty where no gradient was seen.
        parameters: the same of all known parameters.
    """
    sizes = trained or parameters
    total = sum(s * c for s, c in sizes.items() if s >= _SMALLEST_STATE)
    if not total:
        return
    rows = np.flatnonzero(_candidates(facts, draft) & ~by_stack)
    if not len(rows):
        return
    line = named_frame(facts.stacks)[facts.timeline.stack[rows]]
    steps = _files_of_steps(facts)
    known = Counter[int](multiset(facts.size[models & (facts.size >= _SMALLEST_STATE)]))
    # Ghosts are parameters too, where the recording began after the model was there.
    known += multiset(facts.size[facts.ghost & (facts.size >= _SMALLEST_STATE)])
    has_model = _common(known, sizes) >= _WHOLE_SET * total
    other_state = _state_is_known(facts, draft)
    if not has_model:
        missing = sizes - known
        model = _model_of_many_lines(facts, rows, line, missing, sum(s * c for s, c in missing.items()))
        draft.decide(model, Category.WEIGHTS, "constructor.parameters")
        has_model = len(model) > 0
        rows, line = rows[draft.open[rows]], line[draft.open[rows]]
    for frame in _in_order(line[line >= 0]):
        mine = rows[line == frame]
        copies, factor = _copies(multiset(facts.size[mine]), sizes, total)
        whole = copies > 0
        own = frame in steps
        if whole and not has_model and factor == 1.0 and facts.stacks.table.frames[frame].function != "step":
            model = _first_copy(facts, mine, sizes)
            draft.decide(model, Category.WEIGHTS, "constructor.parameters")
            has_model, mine = True, np.setdiff1d(mine, model, assume_unique=True)
            whole = len(mine) > 0
        if not whole and not _is_part(multiset(facts.size[mine]), sizes, total):
            continue
        constructed = facts.stacks.table.frames[frame].function == "__init__"
        if own:
            draft.fill(mine, Category.OPTIMIZER_STATE, Evidence.STACK, "constructor.of-optimizer")
        elif whole and steps_lack_gradients(facts, draft):
            draft.decide(mine, Category.GRADIENTS, "constructor.accumulated-gradients")
        elif has_model and ((whole and not other_state) or constructed):
            draft.decide(mine, Category.OPTIMIZER_STATE, "constructor.state-of-parameters")


def _model_of_many_lines(facts: AllocationFacts, rows: Ints, line: Ints, sizes: Counter[int], total: int) -> Ints:
    """Return the first set of parameters, where each kind of layer makes its own at a line of its own.

    A line that makes a whole set before any of them makes the model itself; then there are none.
    """
    none = np.zeros(0, np.int64)
    whole = np.zeros(len(rows), bool)
    for frame in _in_order(line[line >= 0]):
        whole[line == frame] = _copies(multiset(facts.size[rows[line == frame]]), sizes, total)[0] > 0
    parts = rows[~whole & (line >= 0) & is_among(facts.size[rows], np.array(sorted(sizes), np.int64))]
    if _common(multiset(facts.size[parts]), sizes) < _WHOLE_SET * total:
        return none
    births = facts.timeline.alloc_event
    if whole.any() and births[rows[whole]].min() < births[parts].min():
        return none
    return _first_copy(facts, parts, sizes)


def _candidates(facts: AllocationFacts, draft: Draft) -> Bools:
    """Flag open rows with a stack, made outside modules, that live to the end or that an optimizer step replaces."""
    t = facts.timeline
    first = facts.first_run if facts.first_run >= 0 else t.n_events
    replaced = facts.death == Phase.OPTIMIZER_STEP.code
    lasting = facts.survivor | (t.free_event > t.n_events * _WHOLE_SET) | replaced
    early = (t.alloc_event < first) | (facts.survivor & np.isin(facts.phase, (Phase.LOAD.code, Phase.OTHER.code)))
    found: Bools = (
        ~facts.ghost & early & lasting & draft.open & ~facts.module & (facts.size >= _SMALLEST_STATE)
    ) & facts.stacks.has_python[t.stack]
    return found


def _in_order(lines: Ints) -> list[int]:
    """Return distinct numbers in order of appearance."""
    return list(dict.fromkeys(lines.tolist()))


def _copies(have: Counter[int], sizes: Counter[int], total: int) -> tuple[int, float]:
    """Return how many whole sets of ``sizes`` there are, and their bytes per byte of parameter; (0, 1.0) for none."""
    for factor in _STATE_DTYPES:
        wanted = Counter({int(s * factor): c for s, c in sizes.items() if s >= _SMALLEST_STATE})
        excess = sum(s * c for s, c in have.items() if s not in wanted)
        # A few large matrices can be most of the bytes; a whole set has the small parameters too.
        many = sum((have & wanted).values()) >= _WHOLE_SET * sum(wanted.values())
        alike = _common(have, wanted) >= _WHOLE_SET * total * factor
        if many and alike and excess <= (1 - _WHOLE_SET) * total * factor:
            counts = [have[s] // c for s, c in wanted.items() if have[s]]
            return max(min(counts), 1), factor
    return 0, 1.0


def _is_part(have: Counter[int], sizes: Counter[int], total: int) -> bool:
    """Tell whether a line makes a block for every parameter of some sizes: state of the matrices alone, say."""
    fits = all(sizes[s] and c % sizes[s] == 0 for s, c in have.items())
    return fits and sum(have.values()) >= 2 and sum(s * c for s, c in have.items()) >= _PART_OF_SET * total


def _first_copy(facts: AllocationFacts, rows: Ints, sizes: Counter[int]) -> Ints:
    """Return the rows of the first set that a line makes."""
    seen = Counter[int]()
    first = []
    for row in rows[np.argsort(facts.timeline.alloc_event[rows], kind="stable")].tolist():
        size = int(facts.size[row])
        seen[size] += 1
        if seen[size] <= max(sizes[size], 1):
            first.append(row)
    return np.array(first, np.int64)


def _files_of_steps(facts: AllocationFacts) -> set[int]:
    """Return the frames in files whose other functions allocate in optimizer steps, and torch's optimizers' own."""
    frames, stacks = facts.stacks.table.frames, facts.stacks
    born = np.concatenate([facts.born_in(s) for s in facts.spans_of(Phase.OPTIMIZER_STEP)] or [np.zeros(0, np.int64)])
    named = named_frame(stacks)
    working = {int(f) for f in named[distinct(facts.timeline.stack[born]).astype(np.int64)] if f >= 0}
    functions = {(frames[f].file, frames[f].function) for f in working}
    files = {file for file, function in functions if function != "__init__"}
    torch = stacks.frames_matching(("torch/optim/*:*",))
    return {
        f
        for f in range(len(frames))
        if torch[f] or (frames[f].file in files and (frames[f].file, frames[f].function) not in functions)
    }


def _state_is_known(facts: AllocationFacts, draft: Draft) -> bool:
    """Tell whether some of the run's optimizer state has another origin: recorded, or made in a step and kept."""
    if (draft.category == Category.OPTIMIZER_STATE.code).any():
        return True
    t = facts.timeline
    grads = sum(s * c for s, c in trained_sizes(facts, draft).items())
    born = np.concatenate([facts.born_in(s) for s in facts.spans_of(Phase.OPTIMIZER_STEP)] or [np.zeros(0, np.int64)])
    kept = born[facts.survivor[born]]
    dead = facts.ghost | (t.alloc_event >= 0)
    replaced = dead & (facts.death == Phase.OPTIMIZER_STEP.code) & ~facts.survivor
    replaced[born] = False
    # A step that frees as much as it keeps replaces what there was.
    return int(facts.size[kept].sum()) - int(facts.size[replaced].sum()) > _WHOLE_SET * grads > 0


def _common(a: Counter[int], b: Counter[int]) -> int:
    return sum(s * c for s, c in (a & b).items())
