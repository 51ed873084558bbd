"""A simulated run that is resized asks for what a run simulated at that size asks for, all but a few allocations."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memprof.config.gpus import find_gpu
from memprof.config.settings import Settings
from tests.simulate.conftest import TINY

GIVEN = {"prompt_length": 37, "completion_length": 64}  # 101 tokens: a prime
_FAMILIES = {
    "llama": TINY,
    "qwen2": {**TINY, "model_type": "qwen2"},
    "gemma3_text": {**TINY, "model_type": "gemma3_text", "sliding_window": 4096, "layer_types": ["full_attention"] * 2},
}
_METHODS = {
    "full": {"dtype": "float32", "gradient_checkpointing": False},
    "checkpointed": {"dtype": "bfloat16", "gradient_checkpointing": True, "beta": 0.1},
    "LoRA": {"dtype": "bfloat16", "lora_r": 4, "gradient_checkpointing": True},
}


def _analysed(settings: Settings) -> Any:
    from memprof.simulate.evaluate import analyse
    from memprof.simulate.run import simulate_settings

    return analyse(simulate_settings(settings, gpu=find_gpu("80GiB"), growth=False))


def _of(requested: Any, analysis: Any, least: int) -> list[int]:
    """List the allocations of at least so many bytes that grow with the tokens, in the order they are made."""
    from memprof.simulate.ensemble import BY_TOKENS
    from memprof.vocabulary import Category

    wanted = np.isin(analysis.attribution.category, [list(Category).index(name) for name in BY_TOKENS])
    rows = np.flatnonzero(wanted & (requested >= least))
    return requested[rows[np.argsort(analysis.timeline.program().born[rows], kind="stable")]].tolist()


@pytest.mark.parametrize(
    ("family", "method", "changes", "share"),
    [
        ("llama", "LoRA", {"completion_length": 64 + 312}, 0.99),
        pytest.param("qwen2", "full", {"completion_length": 64 + 170}, 0.9, marks=pytest.mark.heavy),
        pytest.param("gemma3_text", "checkpointed", {"completion_length": 64 + 46}, 0.99, marks=pytest.mark.heavy),
        ("qwen2", "checkpointed", {"per_device_train_batch_size": 12}, 0.99),
    ],
)
def test_a_resized_run_is_the_run_of_that_size(
    tmp_path: Path, family: str, method: str, changes: dict[str, Any], share: float
) -> None:
    from memprof.simulate.resizing import Resizable

    pytest.importorskip("trl")
    (tmp_path / "config.json").write_text(json.dumps(_FAMILIES[family]))
    given = Settings(
        model=str(tmp_path), per_device_train_batch_size=4, num_generations=4, **{**GIVEN, **_METHODS[method]}
    )
    wanted = given.with_(**changes)
    own, there = _analysed(given), _analysed(wanted)
    run, least = Resizable(own, given), 2**14
    requested = run.resized(wanted).requested
    simulated = there.timeline.program().requested
    mine, truth = Counter(_of(requested, own, least)), Counter(_of(simulated, there, least))
    # Not the head's chunks, whose number changes, and some of the decode steps that are executed.
    assert sum((truth & mine).values()) >= share * sum(truth.values())
    assert run.held(wanted) == pytest.approx(int(there.timeline.active.max()), rel=0.02)
    assert run.held(given) == int(own.timeline.active.max())
