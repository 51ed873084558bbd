"""What constructors of the program's own make beside the parameters is state, not weights or temporaries."""

from __future__ import annotations

import pytest

from memprof.vocabulary import Category
from tests.attribution.runs import LAYER, MAIN, MATRIX, PARAMETERS, Result, Run

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
