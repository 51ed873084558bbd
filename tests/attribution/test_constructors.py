"""What constructors of the program's own make beside the parameters is state, not weights or temporaries."""

from __future__ import annotations

import pytest

from memprof.vocabulary import Category
from tests.attribution.runs import (
    CALL,
    EMBEDDING,
    HIDDEN_STATES,
    LAYER,
    LOGITS,
    MAIN,
    MATRIX,
    PARAMETERS,
    Result,
    Run,
)

STATE, WEIGHTS = Category.OPTIMIZER_STATE, Category.WEIGHTS
INIT = ["model.py:12 __init__", "train.py:10 main", MAIN[1]]
OWN = ["optim.py:20 __init__", "train.py:11 main", MAIN[1]]
STEP = ["optim.py:30 step", "train.py:20 main", MAIN[1]]


def iteration(run: Run, step: list[str], *, replaces: list[int] | None = None) -> None:
    """A forward, a backward that leaves a gradient for each parameter, and a step with a block for each."""
    saved = [run.alloc(77 << 10, [*LAYER, "train.py:15 main", MAIN[1]], Category.ACTIVATIONS) for _ in range(4)]
    run.free(run.alloc(8, ["torch/autograd/__init__.py:233 _make_grads", "torch/_tensor.py:623 backward", *MAIN]))
    grads = [run.alloc(size, [], Category.GRADIENTS) for size in reversed(PARAMETERS)]
    for address in saved:
        run.free(address)
    for number, size in enumerate(PARAMETERS):
        new = run.alloc(size, step, STATE if replaces else None)
        if replaces:
            run.free(replaces[number], step)
            replaces[number] = new
        else:
            run.free(new, step)
    for address in grads:
        run.free(address, ["train.py:22 main", MAIN[1]])


def wrong(run: Run) -> dict[int, tuple[Category, Category]]:
    result = run.attribute()
    alive = {a: c for a, c in run.truth.items() if a in run.builder.live}
    return {a: (c, result.category(a)) for a, c in alive.items() if result.category(a) != c}


def wrong_after_training(run: Run) -> dict[int, tuple[Category, Category]]:
    """Train three steps with torch's Adam, and return what is wrong then."""
    for _ in range(3):
        iteration(run, ADAM)
    return wrong(run)


@pytest.mark.parametrize("frames", [OWN, ["optim.py:20 <listcomp>", *OWN]])
@pytest.mark.parametrize("lines", [1, 3])
def test_state_of_an_own_optimizer_updated_in_place(frames: list[str], lines: int) -> None:
    run = Run()
    for size in PARAMETERS:
        kind = 0 if lines == 1 else (size > 2048) + (size > MATRIX)
        run.alloc(size, [f"layers.py:{10 + kind} __init__", *INIT], WEIGHTS)
    for size in PARAMETERS:
        run.alloc(size, frames, STATE)
    for _ in range(3):
        iteration(run, STEP)
    assert not wrong(run)


def test_state_of_an_own_optimizer_made_anew() -> None:
    run = Run()
    for size in PARAMETERS:
        run.alloc(size, INIT, WEIGHTS)
    state = [run.alloc(size, OWN, STATE) for size in PARAMETERS]
    for _ in range(3):
        iteration(run, STEP, replaces=state)
    assert not wrong(run)


def test_state_for_the_matrices_alone_without_any_backward() -> None:
    run = Run()
    for size in PARAMETERS:
        run.alloc(size, ["torch/nn/modules/linear.py:109 __init__", *INIT], WEIGHTS)
    for size in [s for s in PARAMETERS if s >= MATRIX]:
        run.alloc(size, ["estimator.py:9 <listcomp>", "estimator.py:9 __init__", "train.py:12 main", MAIN[1]], STATE)
    for _ in range(3):
        run.free(run.alloc(77 << 10, [*LAYER, "train.py:15 main", MAIN[1]]))
    assert not wrong(run)
    assert isinstance(run.attribute(), Result)


BACKWARD = ["torch/autograd/__init__.py:233 _make_grads", "torch/_tensor.py:623 backward"]
ADAM = ["torch/optim/adam.py:178 _init_group", "torch/optim/adam.py:238 step", "train.py:20 main", MAIN[1]]


def model(run: Run, *frames: str) -> None:
    for size in PARAMETERS:
        run.alloc(size, [*frames, "torch/nn/modules/linear.py:109 __init__", *INIT], WEIGHTS)


def passes(run: Run, count: int = 1) -> list[int]:
    """Forwards and backwards; the gradients of the last are alive, and the program has freed the others."""
    grads: list[int] = []
    for _ in range(count):
        saved = [run.alloc(77 << 10, [*LAYER, "train.py:15 main", MAIN[1]]) for _ in range(4)]
        run.free(run.alloc(8, [*BACKWARD, *MAIN]))
        new = [run.alloc(size, [], Category.GRADIENTS) for size in reversed(PARAMETERS)]
        for address in saved:
            run.free(address)
        for address in grads:
            run.free(address, ["train.py:18 main", MAIN[1]])
        grads = new
    return grads


@pytest.mark.parametrize("bound", [0, 1])
def test_gradients_added_up_in_buffers_are_gone_before_a_step(bound: int) -> None:
    run = Run()
    model(run)
    for size in PARAMETERS:
        run.alloc(size, ["train.py:12 <listcomp>", "train.py:12 main", MAIN[1]], Category.GRADIENTS)
    for step in range(2):
        grads = passes(run, 3)
        for address in grads[bound:]:
            run.free(address, ["train.py:18 main", MAIN[1]])
        for size in [] if step else PARAMETERS:
            run.alloc(size, ADAM, STATE)
        run.free(run.alloc(64, ADAM))
        for address in grads[:bound]:
            run.free(address, ["train.py:18 main", MAIN[1]])
    assert not wrong(run)


@pytest.mark.parametrize("where", ["buffer.py:9 __init__", "main"])
def test_what_no_call_that_makes_parameters_makes_is_data(where: str) -> None:
    run = Run()
    model(run)
    stack = ["train.py:11 main", MAIN[1]]
    for size in (3 << 20, 5 << 20, 5 << 20):
        run.alloc(size, stack if where == "main" else [where, *stack], Category.INPUTS)
    assert not wrong_after_training(run)


def test_a_workspace_of_a_program_without_modules_is_no_weight() -> None:
    run = Run()
    model(run)
    run.alloc(32 << 20, ["train.py:18 gpt", "train.py:11 main", MAIN[1]], Category.WORKSPACE)
    assert not wrong_after_training(run)


def test_buffers_of_a_models_constructor_are_weights() -> None:
    run = Run()
    model(run)
    run.alloc(3 << 20, ["torch/nn/functional.py:6101 normalize", *INIT], WEIGHTS)
    assert not wrong_after_training(run)


def test_an_average_that_a_forward_makes_anew_is_no_activation() -> None:
    run = Run()
    model(run)
    line = ["moco.py:14 forward", CALL, "train.py:15 main", MAIN[1]]
    average: list[int] = []
    for _ in range(3):
        for number, size in enumerate(PARAMETERS):
            new = run.alloc(size, line, WEIGHTS)
            if len(average) > number:
                run.free(average[number], line)
                average[number] = new
            else:
                average.append(new)
        iteration(run, ADAM)
    assert not wrong(run)


def test_parts_of_a_model_that_no_rule_knows_are_no_optimizer_state() -> None:
    run = Run()
    for size in PARAMETERS:
        known = ["torch/nn/modules/linear.py:109 __init__"] if size < 4 * MATRIX or size == EMBEDDING else []
        run.alloc(size, [*known, "cell.py:6 __init__", *INIT], WEIGHTS)
    assert not wrong_after_training(run)


@pytest.mark.parametrize(
    "head", [["model.py:70 forward", CALL], ["torch/nn/functional.py:9 linear", "model.py:70 forward", CALL]]
)
def test_a_head_by_matmul_makes_logits(head: list[str]) -> None:
    run = Run()
    model(run)
    for _ in range(2):
        saved = [run.alloc(HIDDEN_STATES, [*LAYER, *MAIN], Category.ACTIVATIONS) for _ in range(6)]
        saved.append(run.alloc(LOGITS, [*head, *MAIN], Category.LOSS_LOGITS))
        run.free(run.alloc(8, [*BACKWARD, *MAIN]))
        grads = [run.alloc(size, [], Category.GRADIENTS) for size in reversed(PARAMETERS)]
        result = run.attribute()
        assert [result.category(a) for a in saved] == [Category.ACTIVATIONS] * 6 + [Category.LOSS_LOGITS]
        for address in [*saved, *grads]:
            run.free(address, ["train.py:22 main", MAIN[1]])
