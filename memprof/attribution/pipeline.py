"""Run the stages of attribution; each decides rows that no stronger evidence has decided.

The stages in order: recorded owners; gradients; the [tokens, vocabulary] rule; tags; specific stack rules;
lifetimes and fingerprints; context rules (where an allocation was made); unattributed.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from memprof.attribution.facts import AllocationFacts, Draft, codes_of, multiset
from memprof.attribution.gradients import (
    apply_buckets,
    apply_gradients,
    apply_gradients_in_flight,
    apply_unfinished_gradients,
    trained_sizes,
)
from memprof.attribution.lifetime_rules import (
    LAYERS,
    apply_early_parameters,
    apply_early_tensors,
    apply_kv_cache,
    apply_made_in_forward,
    apply_optimizer_state,
    apply_weight_casts,
    apply_workspaces,
    same_stack_births,
)
from memprof.attribution.loaded_models import apply_loaded_models
from memprof.attribution.logits import apply_fused_logprobs, apply_logits, find_vocabulary
from memprof.attribution.older_allocations import apply_ghost_gradients, apply_ghosts, replaced_by_step
from memprof.attribution.phases import phase_track
from memprof.attribution.recorded_owners import apply_owners, apply_roles, apply_tags
from memprof.attribution.result import Attribution
from memprof.attribution.rules import RuleSet, load_rules
from memprof.attribution.stack_index import StackIndex
from memprof.attribution.tags import read_tags
from memprof.frame_paths import recorded_own_folders
from memprof.snapshot.model import Snapshot, distinct, is_among
from memprof.timeline.timeline import Timeline
from memprof.vocabulary import Category, Evidence, Phase

_TRANSIENT = (
    Category.ACTIVATIONS, Category.ACTIVATION_GRADIENTS, Category.LOSS_LOGITS, Category.TEMPORARIES,
    Category.WEIGHT_CASTS, Category.KV_CACHE,
)  # fmt: skip
_NO_GRAD = codes_of(
    Phase.GENERATE, Phase.OLD_LOGPROBS, Phase.REFERENCE_LOGPROBS, Phase.REWARD, Phase.EVALUATE, Phase.OTHER, Phase.LOAD
)
_PASS_DETAIL = {
    Phase.OLD_LOGPROBS.code: "old", Phase.REFERENCE_LOGPROBS.code: "reference", Phase.GENERATE.code: "sampling",
    Phase.FORWARD.code: "policy", Phase.BACKWARD.code: "policy",
}  # fmt: skip


def attribute(snapshot: Snapshot, timeline: Timeline, rules: RuleSet | None = None) -> Attribution:
    """Decide for every allocation of a device its category, the phase that made it, and the evidence for both.

    ``rules`` are stack rules; default: the packaged ones (:func:`load_rules`).
    """
    stacks = StackIndex(snapshot.stacks, rules or load_rules(), recorded_own_folders(snapshot.run.own_folders))
    tags = read_tags(snapshot.metadata)
    track = phase_track(snapshot, timeline, stacks, tags)
    facts = AllocationFacts(snapshot, timeline, stacks, tags, track)
    draft = Draft(len(timeline))
    _decide(facts, draft)
    return _finish(facts, draft)


def _decide(facts: AllocationFacts, draft: Draft) -> None:
    rows = len(draft.category)
    specific = (
        facts.stacks.first_rule("specific", *_pairs(facts))[_pair_of_row(facts)] if rows else np.zeros(0, np.int64)
    )
    resolve = _with_role(facts, specific, "resolve")
    apply_owners(facts, draft)
    apply_roles(facts, draft)
    apply_gradients(facts, draft)
    apply_ghost_gradients(facts, draft)
    _apply_matched(facts, draft, _with_role(facts, specific, "sharding"))
    apply_buckets(facts, draft)
    apply_workspaces(facts, draft)
    trained = _trained(facts, draft, specific, resolve >= 0)
    parameters = _parameter_sizes(facts, draft, resolve, trained)
    vocabulary, vector = find_vocabulary(facts, parameters)
    libraries = np.array([r.category is Category.WORKSPACE for r in facts.stacks.rules.rules] + [False], bool)
    apply_weight_casts(facts, draft, parameters, libraries[specific])
    fused = np.maximum(_with_role(facts, specific, "logprob-backward"), _with_role(facts, specific, "logprob-forward"))
    fused[facts.raw_bytes] = -1  # kernels take scratch there too
    apply_fused_logprobs(facts, draft, fused >= 0, parameters, vocabulary, vector)
    apply_gradients_in_flight(facts, draft, trained or parameters)
    apply_logits(facts, draft, parameters, vocabulary, vector)
    # What is neither the head's gradient nor a hidden state there is a tile of logits, whatever else its tag says.
    _apply_matched(facts, draft, fused)
    _apply_matched(facts, draft, _with_role(facts, specific, "engine"))
    apply_tags(facts, draft, parameters, specific >= 0)
    apply_unfinished_gradients(facts, draft, trained or parameters)
    apply_early_tensors(facts, draft, *_known_by_stack(facts, specific), trained, parameters)
    apply_loaded_models(facts, draft, resolve, trained)
    _apply_matched(facts, draft, np.where(_with_role(facts, specific, "resolve") >= 0, -1, specific))
    apply_optimizer_state(facts, draft, trained)
    apply_kv_cache(facts, draft)
    apply_ghosts(facts, draft, trained, parameters)
    apply_early_parameters(facts, draft, trained)
    apply_made_in_forward(facts, draft, parameters)
    _apply_without_stacks(facts, draft)
    _apply_context(facts, draft)
    _apply_rest(facts, draft)
    _activation_details(facts, draft)


# ------------------------------------------------------------------------------------- stack rules


def _pair_key(facts: AllocationFacts) -> NDArray[np.int64]:
    return facts.timeline.stack.astype(np.int64) * 32 + facts.phase


def _pairs(facts: AllocationFacts) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct (stack, phase of birth) pairs; rules are matched once for each."""
    keys = np.flatnonzero(_occurs(_pair_key(facts)))
    return keys // 32, keys % 32


def _pair_of_row(facts: AllocationFacts) -> NDArray[np.int64]:
    keys = _pair_key(facts)
    place: NDArray[np.int64] = np.cumsum(_occurs(keys)) - 1
    return place[keys]


def _occurs(keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Flag the keys that occur: there are 32 for each distinct stack, so they need no sorting."""
    found = np.zeros(int(keys.max(initial=-1)) + 1, bool)
    found[keys] = True
    return found


def _with_role(facts: AllocationFacts, matched: NDArray[np.int64], role: str) -> NDArray[np.int64]:
    has = np.array([r.role == role for r in facts.stacks.rules.rules] + [False], bool)
    return np.where(has[matched], matched, -1)


def _apply_context(facts: AllocationFacts, draft: Draft) -> None:
    if not len(draft.category):
        return
    matched = facts.stacks.first_rule("context", *_pairs(facts))[_pair_of_row(facts)]
    rules = facts.stacks.rules.rules
    of_loss = np.array([r.tier == "context" and r.category is Category.LOSS_LOGITS for r in rules] + [False], bool)
    only_by_place = np.array([not (r.any or r.inner) for r in rules] + [False], bool)
    loss = of_loss[matched] & facts.stacks.has_python[facts.timeline.stack]
    if facts.module.any():
        _apply_before_the_model(facts, draft, loss)
        _apply_outside_modules(facts, draft, loss & only_by_place[matched] & (facts.phase == Phase.FORWARD.code))
    else:
        matched = np.where(loss, -1, matched)  # a loss follows a model's output, and no model ran
    _apply_matched(facts, draft, matched, context=True)


def _apply_without_stacks(facts: AllocationFacts, draft: Draft) -> None:
    """Decide what a forward makes and its backward frees, where no stack was recorded."""
    if facts.stacks.has_python.any() or facts.module.any() or facts.track.source == "marks":
        return
    saved = (facts.phase == Phase.FORWARD.code) & (facts.death == Phase.BACKWARD.code)
    draft.decide(saved, Category.ACTIVATIONS, "lifetime.dies-in-backward")


def _apply_before_the_model(facts: AllocationFacts, draft: Draft, rows: NDArray[np.bool_]) -> None:
    """Decide those of ``rows`` that a pass makes before its model runs: its inputs.

    CUDA's history has no dtypes, so a mask or a kernel's scratch would be taken for a loss by its place alone.
    """
    early = np.zeros(len(rows), bool)
    for phase in (Phase.OLD_LOGPROBS, Phase.REFERENCE_LOGPROBS, Phase.FORWARD):
        for span in facts.spans_of(phase):
            born = facts.born_in(span)
            ran = np.flatnonzero(facts.module[born])
            early[born[: ran[0] if len(ran) else 0]] = True
    draft.decide(rows & early, Category.INPUTS, "program.before-the-model")


def _apply_outside_modules(facts: AllocationFacts, draft: Draft, rows: NDArray[np.bool_]) -> None:
    """Guess what a forward makes outside modules in a function that no loss is named in.

    What a line made before any model ran, it makes for each pass: its inputs. A size of logits speaks for logits. The
    rest may be a loss only where a backward follows.
    """
    t, logits = facts.timeline, distinct(facts.size[draft.category == Category.LOSS_LOGITS.code])
    first = int(t.alloc_event[facts.module & ~facts.ghost].min(initial=t.n_events))
    stack = t.stack.astype(np.int64)
    inputs = rows & is_among(stack, distinct(stack[~facts.ghost & (t.alloc_event < first)]))
    draft.decide(inputs, Category.INPUTS, "program.before-the-model")
    sized = rows & is_among(facts.size, np.concatenate([logits, logits * 2, logits // 2]))
    rule, loss, other = "context.outside-modules", Category.LOSS_LOGITS, Category.TEMPORARIES
    draft.fill(sized, loss, Evidence.SHAPE, rule, "policy", (other,))
    if facts.has_phase(Phase.BACKWARD):
        draft.fill(rows, loss, Evidence.LIFETIME, rule, "policy", (other, Category.INPUTS))
    draft.fill(rows, other, Evidence.LIFETIME, rule, alternatives=(loss, Category.INPUTS))


def _apply_matched(facts: AllocationFacts, draft: Draft, matched: NDArray[np.int64], *, context: bool = False) -> None:
    """Fill each row from the rule it matched. A context rule without frames is evidence of its phase only."""
    for index in distinct(matched[draft.open & (matched >= 0)]):
        rule = facts.stacks.rules.rules[int(index)]
        rows = (matched == index) & draft.open
        others = [Category(a) for a in rule.alternatives]
        framed = not context or bool(rule.any or rule.inner)
        known = ~facts.stacks.empty[facts.timeline.stack] if not framed else np.ones(len(rows), bool)
        for phase in distinct(facts.phase[rows]):
            detail = rule.detail or (_PASS_DETAIL.get(int(phase), "") if rule.category is Category.LOSS_LOGITS else "")
            here = rows & (facts.phase == phase)
            draft.fill(here & known, rule.category, Evidence.STACK, rule.name, detail, others)
            draft.fill(here, rule.category, Evidence.LIFETIME, rule.name, detail, others)


def _known_by_stack(facts: AllocationFacts, specific: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Flag rows that a stack rule knows, a constructor of the program's own left out, and parameters among them."""
    rules = facts.stacks.rules.rules
    own = np.array([r.name == "fused.parameter-init" for r in rules] + [True], bool)
    holds = np.array([r.category in (Category.WEIGHTS, Category.ADAPTERS) for r in rules] + [False], bool)
    known: NDArray[np.bool_] = ~own[specific]
    return known, known & holds[specific]


# --------------------------------------------------------------------------------- parameter sizes


def _trained(
    facts: AllocationFacts, draft: Draft, matched: NDArray[np.int64], parameters: NDArray[np.bool_]
) -> Counter[int]:
    """Return the trained parameters' sizes: from gradients, or else from optimizer state that the trace sees made."""
    found = trained_sizes(facts, draft)
    if found:
        # A loop that adds gradients up has two for a parameter, or three where names stay bound. A loss has one too.
        loaded = multiset(facts.size[parameters])
        alike = all(count <= 3 * loaded[size] for size, count in found.items() if size >= 256)
        return found & loaded if alike else found
    is_state = np.array([r.category is Category.OPTIMIZER_STATE for r in facts.stacks.rules.rules] + [False], bool)
    state = multiset(facts.size[is_state[matched] & ~facts.ghost & (facts.size >= 64)]) or replaced_by_step(facts)
    known = multiset(facts.size[facts.ghost | (facts.phase == Phase.LOAD.code)])
    halves = Counter({s: c // 2 for s, c in state.items()}) if all(c % 2 == 0 for c in state.values()) else state
    total = sum(s * c for s, c in halves.items())
    # Moments in another dtype than the parameters do not have a parameter's size.
    return halves if total and sum(s * c for s, c in (halves & known).items()) >= 0.8 * total else Counter()


def _parameter_sizes(
    facts: AllocationFacts, draft: Draft, resolve: NDArray[np.int64], trained: Counter[int]
) -> Counter[int]:
    """Return the sizes of all models' parameters that are known before models are told apart."""
    owned = np.isin(
        draft.category,
        [c.code for c in (Category.WEIGHTS, Category.ADAPTERS, Category.REFERENCE_MODEL, Category.REWARD_MODEL)],
    )
    loaded = (resolve >= 0) & (facts.size >= 256)
    long_lived = loaded & (facts.timeline.free_event > facts.timeline.n_events // 2)
    sizes = multiset(facts.size[owned | long_lived])
    if not sizes:
        sizes = multiset(facts.size[facts.ghost & facts.survivor & (facts.size >= 256)])
    return sizes | Counter({s: c for s, c in trained.items() if s >= 256})


# ------------------------------------------------------------------------------------------ the rest


def _apply_rest(facts: AllocationFacts, draft: Draft) -> None:
    """Decide open rows outside every phase by stack or lifetime, and leave the rest unattributed."""
    told = facts.stacks.has_python[facts.timeline.stack] & draft.open & ~facts.ghost
    kept = told & (facts.phase == Phase.LOAD.code) & facts.survivor
    draft.decide(kept, Category.WEIGHTS, "parameters.while-loading")
    loading = told & (facts.phase == Phase.LOAD.code)
    draft.decide(loading, Category.TEMPORARIES, "program.while-loading")
    if all(span.phase in (Phase.LOAD, Phase.OTHER) for span in facts.track.spans):
        told[:] = False  # nothing lies between phases where none is known: a lifetime alone is no purpose
    brief = told & (facts.death == facts.phase) & ~facts.survivor
    draft.decide(brief, Category.TEMPORARIES, "program.between-phases")
    draft.decide(told, Category.INPUTS, "program.kept-between-phases")
    draft.fill(draft.open, Category.UNATTRIBUTED, Evidence.NONE, "")


def _activation_details(facts: AllocationFacts, draft: Draft) -> None:
    """Set activations' details by phase and lifetime; ``kept`` is what no backward follows and nothing freed."""
    t = facts.timeline
    plain = (draft.category == Category.ACTIVATIONS.code) & (draft.detail == 0)
    no_grad = plain & np.isin(facts.phase, _NO_GRAD)
    draft.detail[no_grad] = draft.intern(draft.details, "no_grad")
    forward = plain & (facts.phase == Phase.FORWARD.code)
    starts = np.array([s for s, _ in facts.spans_of(Phase.BACKWARD)] or [t.n_events], np.int64)
    index = np.searchsorted(starts, np.maximum(t.alloc_event, 0))
    following = np.where(index < len(starts), starts[np.minimum(index, len(starts) - 1)], t.n_events)
    saved = forward & (t.free_event > following)
    recomputed = draft.category == Category.ACTIVATIONS.code
    recomputed &= draft.detail == draft.intern(draft.details, "recomputed")
    kept = "boundary" if recomputed.any() else "saved"
    checkpointed = facts.stacks.any_of("checkpoint")[t.stack]
    draft.detail[saved & checkpointed] = draft.intern(draft.details, kept)
    draft.detail[saved & ~checkpointed] = draft.intern(draft.details, "saved")
    held = forward & ~saved & (t.free_event >= t.n_events)
    if not facts.has_phase(Phase.BACKWARD):
        # A pass without gradients frees what a layer makes when the next layers have run.
        rows = np.flatnonzero(forward)
        held[rows] |= same_stack_births(facts, rows) >= LAYERS
    draft.detail[held] = draft.intern(draft.details, "kept")
    draft.detail[forward & ~saved & ~held] = draft.intern(draft.details, "transient")


def _retained(facts: AllocationFacts, draft: Draft) -> NDArray[np.bool_]:
    """Return the rows of transient categories that outlive the step that made them."""
    t = facts.timeline
    last_event: dict[int, int] = {}
    for span in facts.track.spans:
        if span.step is not None and span.step >= 0:
            last_event[span.step] = span.end_event
    known = np.array(sorted(last_event), np.int64)
    ends = np.array([last_event[step] for step in known.tolist()] + [t.n_events], np.int64)
    index = np.searchsorted(known, facts.step)
    found = np.isin(facts.step, known)
    of_step = np.where(found, ends[np.where(found, index, -1)], t.n_events)
    transient = np.isin(draft.category, [c.code for c in _TRANSIENT])
    return transient & (t.free_event > of_step) & (of_step < t.n_events)


def _finish(facts: AllocationFacts, draft: Draft) -> Attribution:
    notes = []
    if facts.track.source == "stacks" and not facts.stacks.has_python.any():
        notes.append("Phases are inferred from lifetimes and annotations: no stacks and no phase marks were recorded.")
    elif facts.track.source == "stacks":
        notes.append("Phases are inferred from stacks; no phase marks were recorded.")
    elif facts.track.source == "none" and facts.timeline.n_events:
        notes.append("Phases are not known: the file has no phase marks, and no stack that shows a phase.")
    return Attribution(
        category=draft.category.astype(np.uint8),
        detail=draft.detail.astype(np.int32),
        evidence=draft.evidence.astype(np.uint8),
        rule=draft.rule.astype(np.int32),
        name=draft.name.astype(np.int32),
        alternatives=draft.alternatives.astype(np.int32),
        phase=facts.phase.astype(np.uint8),
        step=facts.step.astype(np.int32),
        retained=_retained(facts, draft),
        track=facts.track,
        details=draft.details,
        rules=draft.rules,
        names=draft.names,
        alternative_sets=draft.alternative_sets,
        notes=notes,
    )
