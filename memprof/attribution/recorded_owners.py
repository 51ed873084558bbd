"""Decide rows by what was recorded with them: owners (tensors known by identity) and tags."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np

from memprof.attribution.facts import AllocationFacts, Bools, Draft, Ints, codes_of, multiset
from memprof.snapshot.model import Action, distinct, is_among, signed
from memprof.vocabulary import Category, Evidence, Phase

RULE = "recorded.owner"


def apply_owners(facts: AllocationFacts, draft: Draft) -> None:
    """Give every allocation that a recorded owner points into the owner's category, for its whole life.

    An owner states the category of the storage at ``address`` at ``time_us``. Where several owners name one
    allocation, the latest wins (a buffer that became a parameter is a parameter).
    """
    owners = facts.snapshot.run.owners
    if not owners:
        return
    t = facts.timeline
    address = signed([owner.address for owner in owners])
    instant = np.searchsorted(t.event_us, np.array([owner.time_us for owner in owners], np.int64), side="right")
    rows = _rows_at(facts, address, instant)
    for i in np.argsort(-instant, kind="stable"):
        row, owner = rows[i], owners[i]
        if row < 0 or draft.category[row] >= 0:
            continue
        draft.fill(rows[i : i + 1], owner.category, Evidence.OWNER, RULE, owner.detail or "")
        draft.name[row] = draft.intern(draft.names, owner.name or "")


# The last part of the name of a buffer that keeps keys and values.
_CACHE_NAME = re.compile(
    r"(?:^|[._])(?:keys|values|kv|(?:k|v|kv|key|value)s?_?(?:cache|buf(?:fer)?|mem(?:ory)?)s?|cached?_?\w*|past_\w+)$"
)
_LARGE_PART = 0.2  # a model's buffers are less of it
_SECOND = 0.9  # the share of a second model's bytes whose names and sizes are the first one's


def apply_roles(facts: AllocationFacts, draft: Draft) -> None:
    """Decide again what an owner shows to be a model's tensor, but no weight of the policy.

    Modules own caches that are kept in buffers, and a loop's reference model is a module like the policy. An owner is
    evidence of the tensor's module; that it is a cache or a reference is inferred.
    """
    owned = (draft.category == Category.WEIGHTS.code) & (draft.evidence == Evidence.OWNER.code)
    rows = np.flatnonzero(owned)
    if not len(rows):
        return
    grads = np.flatnonzero((draft.category == Category.GRADIENTS.code) & (draft.evidence == Evidence.OWNER.code))
    trained = {draft.names[draft.name[row]] for row in grads}
    for row in rows.tolist():
        name = draft.names[draft.name[row]]
        gathered = draft.details[draft.detail[row]] == "unsharded"
        made_while_decoding = facts.phase[row] == Phase.GENERATE.code and not facts.ghost[row] and not gathered
        if name not in trained and (_CACHE_NAME.search(name) or made_while_decoding):
            draft.category[row] = -1
            draft.decide(np.array([row]), Category.KV_CACHE, "owner.cache-in-buffer")
    again = _second_model(facts, draft, rows[draft.category[rows] == Category.WEIGHTS.code], grads)
    draft.category[again] = -1
    draft.decide(again, Category.REFERENCE_MODEL, "owner.second-model")
    _mark_frozen(facts, draft, rows[draft.category[rows] == Category.WEIGHTS.code], trained)


def _mark_frozen(facts: AllocationFacts, draft: Draft, rows: Ints, trained: set[str]) -> None:
    """Mark weights without a gradient, if there are many, as inferred: a teacher's, a judge's or a frozen tower's.

    Weights that are sharded or flattened have other names than their gradients, which then show nothing.
    """
    names = [draft.names[draft.name[row]] for row in rows.tolist()]
    sharded = any(draft.details[draft.detail[row]] in ("sharded", "unsharded") for row in rows.tolist())
    has_adapters = bool((draft.category == Category.ADAPTERS.code).any())
    if not trained or sharded or has_adapters or not trained <= set(names):
        return
    frozen = rows[[name not in trained for name in names]]
    if facts.size[frozen].sum() > _LARGE_PART * facts.size[rows].sum():
        draft.category[frozen] = -1
        draft.decide(frozen, Category.WEIGHTS, "owner.without-gradient")


def _second_model(facts: AllocationFacts, draft: Draft, rows: Ints, grads: Ints) -> Ints:
    """Return the tensors of models with the trained parameters' sizes that never get a gradient themselves.

    Gradients have the trained model's names. A tensor of another name, or the second of that name, is another model's.
    """
    none = np.zeros(0, np.int64)
    if not len(grads) or _several_train(facts, draft, grads):
        return none
    first_seen = _first_seen(facts, draft)
    sizes = {int(draft.name[row]): int(facts.size[row]) for row in grads.tolist()}
    by_name: dict[int, list[int]] = {}
    for row in sorted(rows.tolist(), key=lambda row: first_seen.get(row, 0)):
        by_name.setdefault(int(draft.name[row]), []).append(row)
    policy = [_trained_of(facts, same, first_seen) for name, same in by_name.items() if name in sizes]
    others = np.setdiff1d(rows, np.array(policy, np.int64))
    trained = multiset(facts.size[np.array(policy, np.int64)])
    alike = multiset(facts.size[others]) & trained
    if not policy or sum(s * c for s, c in alike.items()) < _SECOND * sum(s * c for s, c in trained.items()):
        return none
    found: Ints = others[is_among(facts.size[others], np.array(sorted(trained), np.int64))]
    return found


def _trained_of(facts: AllocationFacts, same: list[int], first_seen: dict[int, int]) -> int:
    """Return, of several models' tensors of one name, the one first seen in a pass with gradients; else the first."""
    return next((row for row in same if _runs_with_gradients(facts, first_seen.get(row, 0))), same[0])


def _several_train(facts: AllocationFacts, draft: Draft, grads: Ints) -> bool:
    """Tell whether two gradients of one name are alive at a time: then two such models train."""
    t = facts.timeline
    last: dict[int, int] = {}
    for row in grads[np.argsort(t.alloc_event[grads], kind="stable")].tolist():
        name = int(draft.name[row])
        if last.get(name, -1) > t.alloc_event[row] >= 0:
            return True
        last[name] = int(t.free_event[row])
    return False


def _first_seen(facts: AllocationFacts, draft: Draft) -> dict[int, int]:
    """Return for each owned row when an owner named it first."""
    owners = [o for o in facts.snapshot.run.owners if o.category is Category.WEIGHTS]
    instant = np.searchsorted(facts.timeline.event_us, [o.time_us for o in owners], side="right")
    found: dict[int, int] = {}
    for row, owner in zip(_rows_at(facts, signed([o.address for o in owners]), instant), owners, strict=True):
        found[int(row)] = min(found.get(int(row), owner.time_us), owner.time_us)
    return found


def _runs_with_gradients(facts: AllocationFacts, time_us: int) -> bool:
    """Tell whether the pass in which a model was first seen saves for a backward."""
    t = facts.timeline
    start = int(np.searchsorted(t.event_us, time_us))
    following = facts.born_in((start, t.n_events))
    ran = following[facts.module[following]]
    return bool(len(ran)) and int(facts.phase[ran[0]]) == Phase.FORWARD.code


def _rows_at(facts: AllocationFacts, address: Any, instant: Any) -> Any:
    """Return for each instant the row alive whose range holds the address; -1 for none."""
    t = facts.timeline
    order = np.lexsort((t.alloc_event, t.address))
    keys = distinct(t.address[order])
    first = np.searchsorted(t.address[order], keys)
    last = np.searchsorted(t.address[order], keys, side="right")
    out = np.full(len(address), -1, np.int64)
    slot = np.searchsorted(keys, address)
    if not len(keys):  # a device of several that holds nothing
        return out
    exact = (slot < len(keys)) & (keys[np.minimum(slot, len(keys) - 1)] == address)
    for i in range(len(address)):
        if exact[i]:
            lives = order[first[slot[i]] : last[slot[i]]]
            k = int(np.searchsorted(t.alloc_event[lives], instant[i])) - 1
            if k >= 0 and t.free_event[lives[k]] >= instant[i]:
                out[i] = lives[k]
                continue
        alive = t.alive_at(int(instant[i]))
        inside = alive[(t.address[alive] <= address[i]) & (address[i] < t.address[alive] + t.size[alive])]
        if len(inside):
            out[i] = inside[0]
    return out


_LOSS = codes_of(Phase.FORWARD, Phase.OLD_LOGPROBS, Phase.REFERENCE_LOGPROBS)
_MODEL_BYTES = 1 << 12


def apply_tags(facts: AllocationFacts, draft: Draft, parameters: Counter[int], by_stack: Bools) -> None:
    """Decide rows by their tag; rows whose tag fits several categories stay open.

    Caches, weights and optimizer state of whole numbers exist, so where a stack rule (``by_stack``) says what an
    allocation is, a dtype of whole numbers is no evidence of an input.
    """
    if not facts.tags.present:
        return
    said = _said(facts)
    for category in Category:
        draft.fill(said == category.code, category, Evidence.METADATA, "tag.category")
    region = {
        name: _equal(facts, "region", name)
        for name in ("forward", "no_grad", "recompute", "backward", "optimizer", "outside")
    }
    inside = region["forward"] | region["no_grad"] | region["recompute"]
    brief = (facts.death == facts.phase) & ~facts.survivor
    _casts(facts, draft, inside, parameters)
    # Cached keys and values also come out of modules, so lifetimes decide first in generation.
    generating = facts.phase == Phase.GENERATE.code
    scratch = facts.raw_bytes & region["outside"] & brief
    draft.decide(scratch, Category.TEMPORARIES, "tag.raw-bytes")
    scratch = facts.raw_bytes & region["backward"]
    draft.decide(scratch, Category.ACTIVATION_GRADIENTS, "tag.raw-bytes")
    numbers = facts.whole_numbers & ~region["optimizer"] & ~inside & ~by_stack
    draft.decide(numbers, Category.INPUTS, "tag.whole-numbers")
    draft.decide(region["recompute"], Category.ACTIVATIONS, "tag.recompute")
    draft.decide(inside & ~generating, Category.ACTIVATIONS, "tag.module-forward")
    draft.decide(region["backward"], Category.ACTIVATION_GRADIENTS, "tag.backward")
    draft.decide(region["optimizer"] & brief, Category.TEMPORARIES, "tag.optimizer")
    loss = region["outside"] & np.isin(facts.phase, _LOSS) & ~(by_stack & facts.whole_numbers)
    draft.decide(loss, Category.LOSS_LOGITS, "tag.loss")


def _said(facts: AllocationFacts) -> Any:
    """Return the category that each row's tag names, or the last of torch's annotations of it; -1 for none."""
    category = facts.tags.category
    said = category[facts.timeline.metadata]
    trace = facts.snapshot.traces.get(facts.timeline.device)
    if trace is None:
        return said
    notes = np.flatnonzero(trace.action == Action.ANNOTATE)
    for note, row in zip(notes, _rows_at(facts, trace.address[notes], notes), strict=True):
        if row >= 0 and category[trace.metadata[note]] >= 0:
            said[row] = category[trace.metadata[note]]
    return said


def _equal(facts: AllocationFacts, key: str, value: str) -> Bools:
    return np.array([v == value for v in facts.tags.column(key)], bool)[facts.timeline.metadata]


def _casts(facts: AllocationFacts, draft: Draft, inside: Bools, parameters: Counter[int]) -> None:
    """Decide conversions inside a module whose matrix has a parameter's extent in another dtype."""
    copies = np.array(["_to_copy" in op for op in facts.tags.column("op")], bool)[facts.timeline.metadata]
    other = np.array(sorted({s // 2 for s in parameters} | {s * 2 for s in parameters}), np.int64)
    flat = facts.tags.rank[facts.timeline.metadata] <= 2
    rows = copies & inside & flat & is_among(facts.size, other) & (facts.size >= _MODEL_BYTES)
    draft.decide(rows, Category.WEIGHT_CASTS, "tag.cast-of-parameter")
