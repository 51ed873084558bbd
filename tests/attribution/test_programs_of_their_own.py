"""Programs that keep their own ways: gradients never zeroed, an optimizer that makes its state anew, forward by name.

Made after public recordings of such programs, which memprof once said to hold a reference model or temporaries.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof import analyze
from tests.synthetic import SnapshotBuilder, frame

KIB = 2**10
LAYERS = 6
#: A model's parameters in bytes: embedding, head, norms (two a layer and one), two matrices a layer.
SIZES = [5000 * KIB, 3000 * KIB, *([2 * KIB] * (2 * LAYERS + 1)), *([1024 * KIB, 4096 * KIB] * LAYERS)]
MODEL = sum(SIZES)
CALL = frame("_call_impl", "/usr/lib/python3.11/site-packages/torch/nn/modules/module.py")
STEP = [frame("step", "optimizer.py"), frame("wrapper", "/usr/lib/python3.11/site-packages/torch/optim/optimizer.py")]


def born(run: SnapshotBuilder, size: int, frames: list[dict[str, object]]) -> int:
    """Allocate with these frames."""
    address = run._block(size, frames)
    run._event("segment_alloc", address, run.segments[address], frames)
    run._event("alloc", address, size, frames)
    return address


def forward_and_backward(run: SnapshotBuilder) -> None:
    """One pass in which backward adds to gradients that are there, as where nobody zeroes them."""
    saved = [born(run, 1500 * KIB, [frame("forward", "model.py"), CALL, frame("main")]) for _ in range(LAYERS)]
    for size in reversed(SIZES):
        added = run.alloc(size)  # no frames: the autograd engine's thread
        run.free(added)
    for address in saved:
        run.free(address)


def test_gradients_that_are_never_zeroed_are_no_reference_model(tmp_path: Path) -> None:
    run = SnapshotBuilder()
    for _ in range(2):
        for size in SIZES:
            run.ghost(size)
    forward_and_backward(run)
    analysis = analyze(run.save(tmp_path / "accumulated.pickle"))
    added = SIZES[0]  # the embedding's, in flight at the peak
    assert analysis.peak.categories["gradients"] == pytest.approx(MODEL + added, rel=0.01)
    assert analysis.peak.categories["weights"] == pytest.approx(MODEL, rel=0.01)
    assert not analysis.peak.categories.get("reference_model")


@pytest.mark.parametrize("held", [0, 2])
def test_state_that_a_step_makes_anew_is_optimizer_state(tmp_path: Path, held: int) -> None:
    """``held``: old moments of the last parameter that the step's own variables still hold at the end."""
    run = SnapshotBuilder()
    for _ in range(2):
        for size in SIZES:
            run.ghost(size)
    moments = [(run.ghost(size), run.ghost(size)) for size in SIZES]
    forward_and_backward(run)
    for number, (size, old) in enumerate(zip(SIZES, moments, strict=True)):
        for before in old:
            born(run, size, STEP)
            if number < len(SIZES) - 1 or not held:
                run.free(before)
        run.free(born(run, size, STEP))
    analysis = analyze(run.save(tmp_path / "anew.pickle"))
    assert analysis.peak.categories["optimizer_state"] == pytest.approx(2 * MODEL, rel=0.12)  # with one old moment more
    assert analysis.peak.categories["gradients"] == pytest.approx(MODEL, rel=0.01)
    assert analysis.peak.categories["weights"] == pytest.approx(MODEL, rel=0.01)
    assert analysis.peak.categories.get("temporaries", 0) <= max(SIZES)


def test_a_forward_called_by_name_runs_a_module_and_a_custom_functions_does_not(tmp_path: Path) -> None:
    run = SnapshotBuilder()
    run.ghost(8 * KIB * KIB)
    by_name = [frame("einsum", "/usr/lib/python3.11/site-packages/torch/functional.py"), frame("forward", "block.py")]
    born(run, 4096 * KIB, [*by_name, frame("main")])
    custom = [
        frame("forward", "loss.py"),
        frame("apply", "/usr/lib/python3.11/site-packages/torch/autograd/function.py"),
    ]
    born(run, 2048 * KIB, [*custom, frame("main")])
    analysis = analyze(run.save(tmp_path / "by_name.pickle"))
    assert {span["phase"] for span in analysis.to_dict()["phases"]} == {"forward"}
    assert analysis.peak.categories["activations"] == 4096 * KIB
