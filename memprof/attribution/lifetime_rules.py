"""Decide by lifetimes: caches, casts, optimizer state, workspaces and early parameters."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

import numpy as np

from memprof.attribution.facts import Bools, Draft, Facts, Ints, codes_of
from memprof.attribution.gradients import first_workspaces
from memprof.attribution.older_allocations import replaced_by_step
from memprof.snapshot.model import is_among
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


def apply_workspaces(facts: Facts, draft: Draft) -> None:
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


def apply_weight_casts(facts: Facts, draft: Draft, parameters: Counter[int], libraries: Bools) -> None:
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


def apply_optimizer_state(facts: Facts, draft: Draft, trained: Counter[int]) -> None:
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


def _inherit(facts: Facts, draft: Draft, kept: Ints, span: tuple[int, int]) -> None:
    """Give parameters that a step makes anew the category of those that it frees for them.

    ``p.data = p.data - ...`` and ``m[i] = beta * m[i] + ...`` store the new tensor, and the old one of the same size is
    freed next: in the order of their births, for each size.
    """
    t = facts.timeline
    dying = np.flatnonzero(
        (t.free_event >= span[0]) & (t.free_event < span[1]) & (t.alloc_event < span[0]) & ~facts.ghost
    )
    dying = dying[draft.category[dying] != Category.GRADIENTS.code]
    dying = dying[np.argsort(t.free_event[dying], kind="stable")]
    waiting: dict[int, list[int]] = {}
    for row in dying.tolist():
        waiting.setdefault(int(facts.size[row]), []).append(row)
    for row in kept[np.argsort(t.alloc_event[kept], kind="stable")].tolist():
        old = next((o for o in waiting.get(int(facts.size[row]), ()) if t.free_event[o] > t.alloc_event[row]), None)
        if old is None:
            continue
        waiting[int(facts.size[row])].remove(old)
        again = np.array([row], np.int64)
        if draft.category[old] == Category.WEIGHTS.code:
            draft.decide(again, Category.WEIGHTS, "optimizer.replaces-parameter")
        elif draft.category[old] == Category.ADAPTERS.code:
            draft.decide(again, Category.ADAPTERS, "optimizer.replaces-parameter")


def _unfinished_step(facts: Facts, draft: Draft, span: tuple[int, int], trained: Counter[int]) -> None:
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


def apply_kv_cache(facts: Facts, draft: Draft) -> None:
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


def same_stack_births(facts: Facts, rows: Ints) -> Ints:
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


def _preallocated(facts: Facts, draft: Draft, span: tuple[int, int]) -> None:
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


def apply_early_parameters(facts: Facts, draft: Draft) -> None:
    """Decide parameters made by code that no rule knows: rows born before anything ran that live to the end."""
    first = next((s.start_event for s in facts.track.spans if s.phase not in ("load", "other")), None)
    if first is None:
        return
    t = facts.timeline
    early = ~facts.ghost & (t.alloc_event < first) & (t.free_event > t.n_events * 0.9) & (facts.size >= 1 << 16)
    draft.decide(early, Category.WEIGHTS, "parameters.before-everything")
