"""The examples run as they stand, and what they record is right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

from memprof import Analysis, analyze
from tests import forked

ROOT = Path(__file__).resolve().parents[1]

# Policy of examples/custom_loop.py, in floats: embeddings, three encoder layers, the head.
WIDTH, VOCABULARY, POSITIONS = 96, 211, 33
LAYER = 4 * WIDTH * (WIDTH + 1) + 2 * 4 * WIDTH * WIDTH + 5 * WIDTH + 4 * WIDTH
PARAMETERS = 2 * VOCABULARY * WIDTH + POSITIONS * WIDTH + 3 * LAYER


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    path = tmp_path_factory.mktemp("loop") / "run.pickle"
    command = [str(ROOT / "examples" / "custom_loop.py"), str(path)]
    # Tensors this small are slower on several threads.
    done = forked.python(command, path.parent, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return analyze(path)


def test_loop_models_are_exact(loop: Analysis) -> None:
    sizes = loop.peak.categories_requested
    assert sizes["weights"] == 4 * PARAMETERS
    assert sizes["reference_model"] == 4 * PARAMETERS


def test_loop_training_state_is_exact(loop: Analysis) -> None:
    last = [b for b in loop.phases if b.phase == "optimizer_step"][-1]
    tensors = 3 + 3 * 12
    assert last.step == 3
    assert last.categories_requested["gradients"] == 4 * PARAMETERS
    assert last.categories_requested["optimizer_state"] == 8 * PARAMETERS + 4 * tensors


def test_loop_phases_are_the_marked_ones(loop: Analysis) -> None:
    marked = {"generate", "reward", "old_logprobs", "reference_logprobs", "forward", "backward", "optimizer_step"}
    assert marked <= {b.phase for b in loop.phases}
    assert {b.step for b in loop.phases if b.phase == "forward"} == {1, 2, 3}


def test_loop_is_explained(loop: Analysis) -> None:
    assert loop.own_peaks["loss_logits"] > 0
    assert loop.peak.categories["unattributed"] <= 0.005 * loop.peak.active_bytes
