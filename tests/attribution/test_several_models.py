"""Which of several models a block belongs to: kinds of mistakes that public programs showed."""

from __future__ import annotations

import pytest

from memprof.vocabulary import Category, Evidence
from tests.attribution.runs import EMBEDDING, LOAD, MAIN, NORM, PARAMETERS, Result, Run, train

WEIGHTS, REFERENCE, VALUE = Category.WEIGHTS, Category.REFERENCE_MODEL, Category.VALUE_MODEL
HEAD = ["torch/nn/modules/linear.py:109 __init__", "model.py:133 __init__", *MAIN]


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
    run.alloc(EMBEDDING, HEAD, WEIGHTS)
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
            run.free(address, ["torch/optim/optimizer.py:1062 zero_grad", *MAIN])
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
