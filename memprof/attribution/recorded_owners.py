"""Decide rows by what was recorded with them: owners (tensors known by identity) and tags."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from memprof.attribution.facts import Bools, Draft, Facts, codes_of
from memprof.snapshot.model import Action, distinct, is_among, signed
from memprof.vocabulary import Category, Evidence, Phase

RULE = "recorded.owner"


def apply_owners(facts: Facts, draft: Draft) -> None:
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


def _rows_at(facts: Facts, address: Any, instant: Any) -> Any:
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


def apply_tags(facts: Facts, draft: Draft, parameters: Counter[int], engine: Bools) -> None:
    """Decide rows by their tag; rows whose tag fits several categories stay open.

    ``engine``: rows that an inference engine allocates. What such a row is for is known by its stack: vLLM's KV cache
    is one tensor of bytes, and its modules' outputs are not activations of the policy.
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
    _casts(facts, draft, inside & ~engine, parameters)

    def decide(rows: Bools, category: Category, rule: str) -> None:
        draft.decide(rows & ~engine, category, rule)

    # Cached keys and values also come out of modules, so lifetimes decide first in generation.
    generating = facts.phase == Phase.GENERATE.code
    scratch = facts.raw_bytes & region["outside"] & brief
    decide(scratch, Category.TEMPORARIES, "tag.raw-bytes")
    scratch = facts.raw_bytes & region["backward"]
    decide(scratch, Category.ACTIVATION_GRADIENTS, "tag.raw-bytes")
    decide(facts.whole_numbers & ~region["optimizer"] & ~inside, Category.INPUTS, "tag.whole-numbers")
    decide(region["recompute"], Category.ACTIVATIONS, "tag.recompute")
    decide(inside & ~generating, Category.ACTIVATIONS, "tag.module-forward")
    decide(region["backward"], Category.ACTIVATION_GRADIENTS, "tag.backward")
    decide(region["optimizer"] & brief, Category.TEMPORARIES, "tag.optimizer")
    decide(region["outside"] & np.isin(facts.phase, _LOSS), Category.LOSS_LOGITS, "tag.loss")


def _said(facts: Facts) -> Any:
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


def _equal(facts: Facts, key: str, value: str) -> Bools:
    return np.array([v == value for v in facts.tags.column(key)], bool)[facts.timeline.metadata]


def _casts(facts: Facts, draft: Draft, inside: Bools, parameters: Counter[int]) -> None:
    """Decide conversions inside a module whose matrix has a parameter's extent in another dtype."""
    copies = np.array(["_to_copy" in op for op in facts.tags.column("op")], bool)[facts.timeline.metadata]
    other = np.array(sorted({s // 2 for s in parameters} | {s * 2 for s in parameters}), np.int64)
    flat = facts.tags.rank[facts.timeline.metadata] <= 2
    rows = copies & inside & flat & is_among(facts.size, other) & (facts.size >= _MODEL_BYTES)
    draft.decide(rows, Category.WEIGHT_CASTS, "tag.cast-of-parameter")
