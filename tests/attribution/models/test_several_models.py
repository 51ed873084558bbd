"""Which of several models a block belongs to: kinds of mistakes that public programs showed."""

from __future__ import annotations

import pytest

from memprof.vocabulary import Category, Evidence
from tests.attribution.runs import (
    CALL,
    EMBEDDING,
    GENERATE,
    HEAD,
    HIDDEN_STATES,
    LAYER,
    LAYERS,
    LOAD,
    LOGITS,
    LOSS,
    MAIN,
    NORM,
    PARAMETERS,
    ZERO_GRAD,
    Result,
    Run,
    train,
)

WEIGHTS, REFERENCE, VALUE = Category.WEIGHTS, Category.REFERENCE_MODEL, Category.VALUE_MODEL
MAKES_HEAD = ["torch/nn/modules/linear.py:109 __init__", "model.py:133 __init__", *MAIN]


def wrong(run: Run, result: Result) -> dict[int, tuple[Category, Category]]:
    alive = {a: c for a, c in run.truth.items() if a in run.builder.live}
    return {a: (c, result.category(a)) for a, c in alive.items() if result.category(a) != c}


def evidence(result: Result, address: int) -> Evidence:
    rows = [i for i in range(len(result.timeline)) if result.timeline.address[i] == address]
    return list(Evidence)[result.said.evidence[rows[-1]]]


def alternatives(result: Result, address: int) -> tuple[str, ...]:
    rows = [i for i in range(len(result.timeline)) if result.timeline.address[i] == address]
    return result.said.alternative_sets[result.said.alternatives[rows[-1]]]


def test_a_head_that_takes_the_embeddings_place_is_no_second_model() -> None:
    # The constructor makes both at lines of their own; tying them frees the first before anything runs.
    run = Run()
    embedding = run.alloc(EMBEDDING, ["torch/nn/modules/sparse.py:166 __init__", "model.py:127 __init__", *MAIN])
    for number, size in enumerate(PARAMETERS[1:]):
        made = ["torch/nn/modules/linear.py:109 __init__", f"model.py:{20 + number % 6} __init__"]
        run.alloc(size, [*made, "model.py:128 __init__", *MAIN], WEIGHTS)
    run.alloc(EMBEDDING, MAKES_HEAD, WEIGHTS)
    run.free(embedding)
    train(run, reference=False)
    assert not wrong(run, run.attribute())


def test_of_two_equal_models_the_order_of_birth_is_no_certain_evidence() -> None:
    run = Run()
    first, second = run.load(50, WEIGHTS), run.load(51, REFERENCE)
    train(run)
    result = run.attribute()
    assert not wrong(run, result)
    assert {evidence(result, a) for a in [*first, *second]} == {Evidence.FINGERPRINT}
    assert alternatives(result, first[0]) == ("reference_model",)
    assert alternatives(result, second[0]) == ("weights",)


def train_with_critic(run: Run, critic: list[int]) -> None:
    """Generation, then a backward through both models."""
    for step in range(2):
        run.generate()
        run.no_grad_pass(60)
        run.no_grad_pass(61)
        gradients = run.backward(run.forward())
        gradients += [run.alloc(size, [], Category.GRADIENTS) for size in reversed(critic)]
        run.step(first=step == 0)
        for address in gradients:
            run.free(address, [*ZERO_GRAD, *MAIN])
    run.alloc(64, ["train.py:95 main", MAIN[1]])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_the_model_that_the_second_set_of_gradients_fits_is_the_critic(order: tuple[int, ...]) -> None:
    # Policy, reference and critic have one architecture; the critic has a head of its own, and is trained.
    run = Run()
    head = [NORM, 2048]
    for kind in order:
        if kind < 2:
            run.load(50 + kind, (WEIGHTS, REFERENCE)[kind])
            continue
        for size in [*PARAMETERS, *head]:
            run.alloc(size, [*LOAD, "train.py:52 main", MAIN[1]], VALUE)
    train_with_critic(run, [*PARAMETERS, *head])
    assert not wrong(run, run.attribute())


def test_where_a_copy_is_the_reference_a_model_with_another_head_is_none() -> None:
    run = Run()
    run.load(50, WEIGHTS)
    run.load(51, REFERENCE)
    for size in [*PARAMETERS, NORM, 2048]:
        run.alloc(size, [*LOAD, "train.py:52 main", MAIN[1]], Category.REWARD_MODEL)
    train(run)
    result = run.attribute()
    assert not wrong(run, result)


def test_a_cache_that_a_training_forward_fills_is_no_generation() -> None:
    # Transformers' models return a cache unless they are told not to, in training too.
    run = Run()
    run.load(50, WEIGHTS)
    for step in range(2):
        saved = run.forward()
        cache = ["transformers/cache_utils.py:136 update", "model.py:45 forward", CALL, *LAYER, *LOSS, *MAIN]
        saved += [run.alloc(4 * NORM, cache) for _ in range(LAYERS)]
        gradients = run.backward(saved)
        run.step(first=step == 0)
        for address in gradients:
            run.free(address, [*ZERO_GRAD, *MAIN])
    run.alloc(64, ["train.py:95 main", MAIN[1]])
    assert "generate" not in run.attribute().phases()


def test_logits_of_a_model_that_trains_inside_a_wrapper_and_generates_without() -> None:
    run = Run()
    run.load(50, WEIGHTS)
    for address in [run.alloc(HIDDEN_STATES, [*LAYER, *GENERATE, *MAIN]) for _ in range(6)]:
        run.free(address, MAIN)
    run.free(run.alloc(LOGITS, [*HEAD, *GENERATE, *MAIN]), MAIN)
    wrapped = ["wrapper.py:10 forward", CALL, *LOSS, *MAIN]
    saved = [run.alloc(HIDDEN_STATES, [*LAYER, *wrapped], Category.ACTIVATIONS) for _ in range(6)]
    logits = run.alloc(LOGITS, [*HEAD, *wrapped], Category.LOSS_LOGITS)
    run.backward([*saved])
    result = run.attribute()
    assert result.category(logits) is Category.LOSS_LOGITS
