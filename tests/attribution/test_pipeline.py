"""Whole runs of known bytes, recorded in all the ways a recording can be less than whole."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.attribution.facts import AllocationFacts
from memprof.vocabulary import Category, Evidence
from tests.attribution.runs import (
    EMBEDDING,
    HIDDEN_STATES,
    INIT_GROUP,
    LAYER,
    LOAD,
    LOGITS,
    LOSS,
    MAIN,
    MAKE_GRADS,
    MATRIX,
    NORM,
    PARAMETERS,
    TOKENS,
    VOCABULARY,
    ZERO_GRAD,
    Result,
    Run,
    train,
)


def wrong(run: Run, result: Result, instant: int) -> Counter[tuple[str, str]]:
    """Bytes alive at an instant that were not given the category the run means them to have."""
    line, said = result.timeline, result.said
    out: Counter[tuple[str, str]] = Counter()
    for row in line.alive_at(instant).tolist():
        meant = run.truth.get(int(line.address[row]))
        found = list(Category)[said.category[row]]
        if meant is not None and found is not meant:
            out[meant.value, found.value] += int(line.requested[row])
    return out


def check(run: Run, result: Result) -> None:
    """Right at the peak and at each phase's peak."""
    line = result.timeline
    moments = [line.peak_instant]
    for span in result.said.track.spans:
        inside = line.allocated[span.start_event + 1 : span.end_event + 1]
        moments.append(span.start_event + 1 + int(np.argmax(inside)))
    for instant in moments:
        assert not wrong(run, result, instant), instant


@given(st.lists(st.integers(0, 6), max_size=12), st.integers(-1, 7), st.integers(0, 8))
def test_rows_freed_in_a_stretch(freed: list[int], start: int, length: int) -> None:
    timeline: Any = SimpleNamespace(free_event=np.array(freed, np.int64), n_events=6)
    nothing: Any = None
    found = AllocationFacts(nothing, timeline, nothing, nothing, nothing).freed_in((start, start + length))
    rows = [row for row, event in enumerate(freed) if start <= event < start + length]
    assert found.tolist() == sorted(rows, key=lambda row: freed[row])


def test_a_whole_run() -> None:
    run = Run()
    run.load(5, Category.WEIGHTS)
    run.load(6, Category.REFERENCE_MODEL)
    train(run)
    result = run.attribute()
    assert result.phases()[:7] == [
        "load", "generate", "old_logprobs", "reference_logprobs", "forward", "backward", "optimizer_step",
    ]  # fmt: skip
    check(run, result)
    assert max(s.step or 0 for s in result.said.track.spans) == 2


def test_one_log_prob_pass_beside_one_model_is_the_old_policy() -> None:
    run = Run()
    run.load(5, Category.WEIGHTS)
    train(run, reference=False)
    result = run.attribute()
    assert "old_logprobs" in result.phases()
    assert "reference_logprobs" not in result.phases()
    check(run, result)


def test_one_log_prob_pass_beside_two_models_is_the_reference() -> None:
    run = Run()
    run.load(5, Category.WEIGHTS)
    run.load(6, Category.REFERENCE_MODEL)
    train(run, reference=False)
    result = run.attribute()
    assert "reference_logprobs" in result.phases()
    assert "old_logprobs" not in result.phases()
    check(run, result)


def test_loaders_without_a_caller_are_split_by_order() -> None:
    thread = ["transformers/core_model_loading.py:800 _materialize_copy", "threading.py:975 run"]
    run = Run()
    for category in (Category.WEIGHTS, Category.REFERENCE_MODEL):
        for size in PARAMETERS:
            run.alloc(size, thread, category)
    train(run)
    check(run, run.attribute())


@pytest.mark.parametrize("reference", [False, True])
def test_recording_after_load(reference: bool) -> None:
    run = Run()
    for category in (Category.WEIGHTS, Category.REFERENCE_MODEL)[: 1 + reference]:
        for size in PARAMETERS:
            run.ghost(size, category)
    train(run, reference=reference)
    result = run.attribute()
    check(run, result)
    ghosts = result.timeline.alloc_event < 0
    sets = {result.said.alternative_sets[i] for i in result.said.alternatives[ghosts]}
    assert ("reference_model",) in sets if reference else sets <= {(), ("inputs",)}


def test_recording_after_the_first_step() -> None:
    run = Run()
    for category in (Category.WEIGHTS, Category.REFERENCE_MODEL):
        for size in PARAMETERS:
            run.ghost(size, category)
    for size in PARAMETERS:
        for _ in range(2):
            run.ghost(size, Category.OPTIMIZER_STATE)
    for step in range(2):
        run.generate()
        run.no_grad_pass(60)
        run.no_grad_pass(61)
        gradients = run.backward(run.forward())
        run.step(first=False)
        for address in gradients:
            run.free(address, ["torch/optim/optimizer.py:1062 zero_grad", *MAIN])
        assert step < 2
    run.alloc(64, MAIN)
    check(run, run.attribute())


def test_an_optimizer_of_ones_own() -> None:
    run = Run()
    run.load(5, Category.WEIGHTS)
    gradients = run.backward(run.forward())
    state = []
    for size in PARAMETERS:
        stack = ["optimizers.py:55 step", "torch/optim/optimizer.py:493 wrapper", *MAIN]
        state.append(run.alloc(size, stack, Category.OPTIMIZER_STATE))
        run.free(run.alloc(size, stack))
    for address in gradients:
        run.free(address, ["torch/optim/optimizer.py:1062 zero_grad", *MAIN])
    run.forward()
    run.alloc(64, MAIN)
    result = run.attribute()
    assert {result.category(a) for a in state} == {Category.OPTIMIZER_STATE}
    assert {result.rule(a) for a in state} == {"optimizer.outlives-step"}


def test_what_zero_grad_frees_was_a_gradient() -> None:
    run = Run()
    run.load(5, Category.WEIGHTS)
    for _ in range(2):
        for address in run.backward(run.forward()):
            run.free(address, ["torch/optim/optimizer.py:1062 zero_grad", *MAIN])
    result = run.attribute()
    gradients = [a for a, c in run.truth.items() if c is Category.GRADIENTS]
    assert {result.category(a) for a in gradients} == {Category.GRADIENTS}


def test_a_history_that_ends_in_backward() -> None:
    run = Run()
    run.load(5, Category.WEIGHTS)
    run.backward(run.forward())
    result = run.attribute()
    embedding = [a for a, c in run.truth.items() if c is Category.GRADIENTS][-1]
    assert result.category(embedding) is Category.GRADIENTS
    assert result.rule(embedding) == "gradient.unfinished-backward"


def test_scratch_at_the_end_of_a_history_is_no_gradient() -> None:
    run = Run()
    run.load(5, Category.WEIGHTS)
    run.forward()
    run.alloc(MATRIX, [*LAYER, *LOSS, *MAIN])  # so the size alone does not say gradient
    run.alloc(4, [*MAKE_GRADS, *MAIN])
    scratch = run.alloc(MATRIX, [])
    assert run.attribute().category(scratch) is Category.ACTIVATION_GRADIENTS


def test_what_the_backward_needs_is_saved_and_the_rest_of_a_forward_is_not() -> None:
    run = Run()
    run.load(5, Category.WEIGHTS)
    run.free(run.alloc(HIDDEN_STATES, [*LAYER, *LOSS, *MAIN]))
    saved = run.forward()
    run.free(run.alloc(HIDDEN_STATES, [*LAYER, *LOSS, *MAIN]))
    run.backward(saved)
    run.alloc(64, MAIN)
    said = run.attribute().said
    details = Counter(said.details[d] for d in said.detail[said.category == Category.ACTIVATIONS.code])
    assert details == {"saved": len(saved) - 2, "transient": 2}


def test_what_outlives_its_step_is_retained_and_what_the_history_ends_on_is_not() -> None:
    run = Run()
    run.load(5, Category.WEIGHTS)
    left = []
    for step in range(2):
        saved = run.forward()
        left.append(run.alloc(HIDDEN_STATES, [*LAYER, *LOSS, *MAIN]))
        gradients = run.backward(saved)
        run.step(first=step == 0)
        for address in gradients:
            run.free(address, [*ZERO_GRAD, *MAIN])
    result = run.attribute()
    assert result.timeline.address[result.said.retained].tolist() == left[:1]


def test_preallocated_cache() -> None:
    run = Run()
    run.load(5, Category.WEIGHTS)
    generate = ["train.py:10 generate", *MAIN]
    cache = [run.alloc(1 << 20, ["train.py:11 Buffers", *generate], Category.KV_CACHE) for _ in range(6)]
    ids = run.alloc(400, generate, Category.INPUTS)
    for _ in range(10):
        run.free(run.alloc(HIDDEN_STATES, [*LAYER, *generate]))
    for address in [*cache, ids]:
        run.free(address, MAIN)
    run.alloc(4, [*LAYER, *LOSS, *MAIN])
    result = run.attribute()
    assert {result.category(a) for a in cache} == {Category.KV_CACHE}
    assert result.category(ids) is Category.INPUTS


def test_copies_that_attention_in_full_makes_are_no_cache() -> None:
    """One call makes keys and values in single precision, repeats them for grouped heads, and scales the keys."""
    run = Run()
    run.load(5, Category.WEIGHTS)
    generate, cache = ["train.py:10 generate", *MAIN], list[int]()
    cat = ["transformers/cache_utils.py:136 update", *LAYER, *generate]
    copies: list[int] = []
    for step in range(1, 6):
        for layer in range(4):
            new = run.alloc(step << 12, cat, Category.KV_CACHE)
            if step > 1:
                run.free(cache.pop(0), MAIN)
            cache.append(new)
            made = [run.alloc(step << 15, ["sdpa_attention.py:193 forward", *LAYER, *generate]) for _ in range(6)]
            copies += made
            for address in made:
                run.free(address, MAIN)
            run.free(run.alloc(HIDDEN_STATES + layer, [*LAYER, *generate]), MAIN)
    for address in cache:
        run.free(address, MAIN)
    run.alloc(4, [*LAYER, *LOSS, *MAIN])
    result = run.attribute()
    assert {result.category(address) for address in copies} == {Category.ACTIVATIONS}
    assert {result.category(address) for address in cache} == {Category.KV_CACHE}


def test_autocast_copies_are_weight_casts_and_inputs_are_not() -> None:
    run = Run()
    run.load(5, Category.WEIGHTS)
    linear = [
        "torch/nn/modules/linear.py:134 forward",
        "torch/nn/modules/module.py:1789 _call_impl",
        *LAYER,
        *LOSS,
        *MAIN,
    ]
    half = [s // 2 for s in PARAMETERS if s > 1 << 16]
    casts, others = [], []
    for size in half:
        others.append(run.alloc(512, linear))
        casts.append(run.alloc(size, linear))
        others.append(run.alloc(size, linear))
        run.alloc(96, [*LAYER, *LOSS, *MAIN])
    result = run.attribute()
    assert {result.category(a) for a in casts} == {Category.WEIGHT_CASTS}
    assert {result.category(a) for a in others} == {Category.ACTIVATIONS}


def test_owners_override_everything() -> None:
    run = Run()
    state = run.alloc(1 << 20, [*INIT_GROUP, *MAIN])
    plain = run.alloc(1 << 20, [*INIT_GROUP, *MAIN])
    owner = [state + 4096, run.builder.time_us, "kv_cache", "keys", "layers.0.keys"]
    result = run.attribute({"owners": [owner, ["junk"], [1, 2, "nonsense"], None]})
    row = int(np.flatnonzero(result.timeline.address == state)[0])
    assert result.category(state) is Category.KV_CACHE
    assert list(Evidence)[result.said.evidence[row]] is Evidence.OWNER
    assert result.said.details[result.said.detail[row]] == "keys"
    assert result.said.names[result.said.name[row]] == "layers.0.keys"
    assert result.category(plain) is Category.OPTIMIZER_STATE


def test_an_owner_holds_for_one_life_of_an_address() -> None:
    run = Run()
    first = run.alloc(1 << 20, [*INIT_GROUP, *MAIN])
    known = run.builder.time_us
    run.free(first)
    run.builder.live[first] = {"size": 1 << 20, "requested_size": 1 << 20, "frames": []}
    run.builder._event("alloc", first, 1 << 20, [])
    result = run.attribute({"owners": [[first, known, "inputs", None, None]]})
    rows = np.flatnonzero(result.timeline.address == first)
    said = [list(Category)[result.said.category[r]] for r in rows[np.argsort(result.timeline.alloc_event[rows])]]
    assert said[0] is Category.INPUTS
    assert said[1] is not Category.INPUTS


def test_tags_are_metadata_and_shapes_are_shape() -> None:
    tag = "memprof:phase=forward;step=3;region={};shape={};dtype={};op={}"
    run = Run()
    run.load(5, Category.WEIGHTS)
    inside = run.alloc(4096, [], metadata=tag.format("forward", "4x256", "float32", "aten.mul.Tensor"))
    ids = run.alloc(4000, [], metadata=tag.format("outside", "500", "int64", "aten.cat.default"))
    loss = run.alloc(400, [], metadata=tag.format("outside", "100", "float32", "aten.sum.dim_IntList"))
    cast = run.alloc(256 * 256 * 2, [], metadata=tag.format("forward", "256x256", "bfloat16", "aten._to_copy.default"))
    result = run.attribute()
    assert [result.category(a) for a in (inside, ids, loss, cast)] == [
        Category.ACTIVATIONS, Category.INPUTS, Category.LOSS_LOGITS, Category.WEIGHT_CASTS,
    ]  # fmt: skip
    rows = {a: int(np.flatnonzero(result.timeline.address == a)[0]) for a in (inside, cast)}
    assert list(Evidence)[result.said.evidence[rows[inside]]] is Evidence.METADATA
    assert list(Evidence)[result.said.evidence[rows[cast]]] is Evidence.SHAPE
    assert result.said.step[rows[inside]] == 3


def test_a_snapshot_without_history_has_no_phases() -> None:
    run = Run()
    run.ghost(1 << 20, Category.WEIGHTS)
    result = run.attribute()
    assert result.said.track.source == "none"
    assert result.said.track.spans == []
    assert list(Category)[result.said.category[0]] is Category.WEIGHTS


FRAMES = [
    "torch/optim/adam.py:3 _init_group", "torch/nn/modules/module.py:9 _call_impl", "model.py:4 forward",
    "train.py:7 generate", "torch/_tensor.py:6 backward", "transformers/cache_utils.py:8 update",
    "train.py:2 main", "??:0 at::native::foo", "trl/kernels/chunked_logprob.py:5 backward",
    "torch/nn/modules/linear.py:1 forward", "train.py:30 compute_loss",
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 1 << 27), st.lists(st.sampled_from(FRAMES), max_size=6)), max_size=40),
    st.lists(st.integers(0, 39), max_size=30),
    st.lists(st.sampled_from([512, 4096, 8_519_680, 1 << 25, 1 << 22]), min_size=1, max_size=12),
)
def test_every_row_gets_exactly_one_category(
    births: list[tuple[int, list[str]]], deaths: list[int], ghosts: list[int]
) -> None:
    run = Run()
    for size in ghosts:
        run.ghost(size, Category.WEIGHTS)
    addresses = []
    for i, (size, stack) in enumerate(births):
        addresses.append(run.alloc(size, stack))
        if i < len(deaths) and deaths[i] < len(addresses) and addresses[deaths[i]] in run.builder.live:
            run.free(addresses[deaths[i]])
    result = run.attribute()
    said, n = result.said, len(result.timeline)
    assert {len(c) for c in (said.category, said.detail, said.evidence, said.rule, said.phase, said.retained)} == {n}
    assert (said.category < len(Category)).all()
    unexplained = said.category == Category.UNATTRIBUTED.code
    assert (unexplained == (said.evidence == Evidence.NONE.code)).all()
    assert all(said.rules[r] for r in said.rule[~unexplained])
    assert len(said.track.phase) == result.timeline.n_events
    assert sum(s.end_event - s.start_event for s in said.track.spans) == result.timeline.n_events


def test_adapters_and_a_reward_model_recorded_after_load() -> None:
    """Base model, then reward model, then adapters, all older than the recording; only adapters have gradients."""
    run = Run()
    base = [s for _ in range(4) for s in (2_000_000, 2_000_000, 8_000_000, 6_144)]
    judge = [s for _ in range(4) for s in (3_000_000, 3_000_000, 5_000_000, 4_608)]
    for size in [40_000_000, *base, 6_144]:
        run.ghost(size, Category.WEIGHTS)
    for size in [50_000_000, *judge, 4_608]:
        run.ghost(size, Category.REWARD_MODEL)
    adapters = [65_536, 131_072] * 4
    for size in adapters:
        run.ghost(size, Category.ADAPTERS)
    run.free(run.alloc(1 << 20, [*LAYER, "train.py:10 generate", *MAIN]))
    run.free(run.alloc(1 << 20, [*LAYER, "train.py:15 compute_rewards", *MAIN]))
    saved = run.alloc(1 << 20, [*LAYER, *LOSS, *MAIN])
    gradients = [run.alloc(size, [], Category.GRADIENTS) for size in adapters]
    run.free(saved)
    run.alloc(4, ["torch/nn/utils/clip_grad.py:95 _get_total_norm", *MAIN])
    for address in gradients:
        run.free(address, ["torch/optim/optimizer.py:1062 zero_grad", *MAIN])
    run.alloc(64, MAIN)
    result = run.attribute()
    assert not wrong(run, result, result.timeline.peak_instant)


def test_a_reward_model_of_other_sizes_recorded_after_load() -> None:
    run = Run()
    for size in PARAMETERS:
        run.ghost(size, Category.WEIGHTS)
    for size in (30_000_000, 7_000_000, 7_000_000):
        run.ghost(size, Category.REWARD_MODEL)
    run.free(run.alloc(1 << 20, [*LAYER, "train.py:15 compute_rewards", *MAIN]))
    gradients = run.backward(run.forward())
    run.step(first=True)
    for address in gradients:
        run.free(address, ["torch/optim/optimizer.py:1062 zero_grad", *MAIN])
    run.alloc(64, MAIN)
    check(run, run.attribute())


def test_bytes_and_whole_numbers_of_a_logits_size_are_no_logits() -> None:
    """A kernel's scratch in the fused log-prob product and in backward, beside logits of the same size."""
    run = Run()
    run.load(5, Category.WEIGHTS)
    tag = "memprof:phase={};step=1;region={};shape={};dtype={};op={}"
    wide, flat = f"100x{VOCABULARY}", str(LOGITS)
    fused = ["trl/kernels/chunked_logprob.py:347 forward", *LOSS, *MAIN]
    logits = run.alloc(LOGITS, fused, metadata=tag.format("forward", "outside", wide, "float32", "aten.mm.default"))
    scratch = run.alloc(LOGITS, fused, metadata=tag.format("forward", "outside", flat, "uint8", "aten.index.Tensor"))
    mask = run.alloc(100, fused, metadata=tag.format("forward", "outside", "100", "bool", "aten.ne.Scalar"))
    run.free(scratch)
    run.free(mask)
    later = [
        run.alloc(LOGITS, MAKE_GRADS, metadata=tag.format("backward", "backward", *kind))
        for kind in ((wide, "float32", "aten.mul.Tensor"), (flat, "uint8", "aten.sort.default"))
    ]
    for address in (*later, logits):
        run.free(address)
    result = run.attribute()
    assert result.category(logits) is Category.LOSS_LOGITS
    assert (result.category(scratch), result.rule(scratch)) == (Category.TEMPORARIES, "tag.raw-bytes")
    assert [result.category(a) for a in later] == [Category.LOSS_LOGITS, Category.ACTIVATION_GRADIENTS]


def test_what_peft_makes_anew_for_four_bit_training_is_no_reference_model() -> None:
    """Embeddings and norms in fp32 come from one place, packed matrices from another; the reference is the policy."""
    run = Run()
    packed = [MATRIX // 4 + 16 * i for i in range(40)]
    anew = [*LOAD, "train.py:20 main", MAIN[1]]
    policy = [run.alloc(size, [*LOAD, "train.py:10 main", MAIN[1]], Category.WEIGHTS) for size in packed]
    policy += [run.alloc(size, anew, Category.WEIGHTS) for size in (EMBEDDING // 8, NORM, NORM, NORM)]
    adapters = [run.alloc(size, ["peft/tuners/lora/layer.py:90 update_layer", *MAIN]) for size in (2048, 3072) * 20]
    for step in range(2):
        run.generate()
        run.no_grad_pass(60)
        run.no_grad_pass(61)
        saved = run.forward()
        run.alloc(4, [*MAKE_GRADS, *MAIN])
        gradients = [run.alloc(size, []) for size in (2048, 3072) * 20]
        for address in saved:
            run.free(address)
        for size in (2048, 3072) * 20 if step == 0 else ():
            run.alloc(size, [*INIT_GROUP, *MAIN], Category.OPTIMIZER_STATE)
        for address in gradients:
            run.free(address, [*ZERO_GRAD, *MAIN])
    result = run.attribute()
    assert "reference_logprobs" in result.phases()
    assert {result.category(address) for address in policy} == {Category.WEIGHTS}
    assert Category.REFERENCE_MODEL not in {result.category(address) for address in adapters}


def _marked(run: Run, since_us: int) -> dict[str, object]:
    """One forward from ``since_us`` on: what a recording of CUDA's history marks without tags."""
    return {"phases": [{"phase": "forward", "step": 1, "start_us": since_us, "end_us": None}]}


def test_what_a_pass_makes_before_its_model_runs_is_no_part_of_the_loss() -> None:
    """CUDA's history has no dtype: scratch of bytes is told from the loss by when it is made."""
    run = Run()
    run.load(5, Category.WEIGHTS)
    since = run.builder.time_us + 5
    mask = run.alloc(50_000, [*LOSS, *MAIN])
    scratch = run.alloc(3 << 20, [*LOSS, *MAIN])
    run.free(scratch)
    run.forward()
    stats = run.alloc(TOKENS * 4, ["train.py:32 mean", *LOSS, *MAIN])
    result = run.attribute(_marked(run, since))
    assert [(result.category(a), result.rule(a)) for a in (mask, scratch)] == [
        (Category.INPUTS, "program.before-the-model")
    ] * 2
    assert (result.category(stats), result.rule(stats)) == (Category.LOSS_LOGITS, "context.loss")


def test_where_no_model_runs_there_is_no_loss() -> None:
    run = Run()
    kept = run.alloc(32 << 20, ["train.py:12 main", MAIN[1]])
    since = run.builder.time_us + 5
    scratch = run.alloc(48 << 20, ["train.py:14 main", MAIN[1]])
    run.free(scratch)
    run.alloc(64, ["train.py:15 main", MAIN[1]])
    result = run.attribute(_marked(run, since))
    assert (result.category(scratch), result.rule(scratch)) == (Category.TEMPORARIES, "program.between-phases")
    assert result.category(kept) is not Category.LOSS_LOGITS
