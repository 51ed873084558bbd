"""A real run of the lean trainer, recorded by the callback, and simulated from that recording alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.trl, pytest.mark.slow, pytest.mark.usefixtures("only_new_tensors")]


def _trained(folder: Path, **settings: Any) -> dict[str, Any]:
    """The report of a run's second step."""
    import torch
    from datasets import Dataset

    from memprof import MemProfCallback, analyze
    from tests.grpo.trainers import build, saved_llama

    watch = MemProfCallback(output_dir=folder / "watched", steps=[2], report=False)
    prompts = Dataset.from_dict({"prompt": ["t1 t2 t3 t4 t5 t6 t7"] * 8})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer = build(
            "lean", saved_llama(folder / "model"), folder, data=prompts, max_steps=2, max_completion_length=60,
            generation_kwargs={"min_new_tokens": 60}, **settings,
        )  # fmt: skip
        trainer.add_callback(watch)
        trainer.train()
    finally:
        torch.set_num_threads(threads)
    return analyze(next((folder / "watched").glob("*.pickle"))).to_dict()


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, marks=pytest.mark.heavy),
        {"checkpointing": "full", "max_tokens_per_piece": 134, "generation_batch": 2},
    ],
)
def test_a_recorded_lean_run_is_simulated_as_it_was(tmp_path: Path, given: dict[str, Any]) -> None:
    from memprof.advice.candidates import candidates_for
    from memprof.config.from_recording import place_model, settings_like
    from memprof.simulate.evaluate import evaluate
    from tests.report.plain import run_of

    report = _trained(tmp_path, **given)
    config = report["source"]["config"]
    assert config["recipe"] == "lean"
    assert {name: config[name] for name in given} == given
    assert config["gradient_checkpointing"] == bool(given)  # the trainer's own, whose switch in TRL's arguments is off
    likeness = settings_like(report["source"])
    settings = place_model(likeness, tmp_path / "models")
    assert (settings.recipe, settings.prompt_length, settings.completion_length) == ("lean", 7, 60)
    assert settings.checkpointing == given.get("checkpointing", "none")
    assert settings.max_tokens_per_piece == given.get("max_tokens_per_piece")
    simulated = evaluate(settings, None, stacks=False).analysis.peak.allocated_bytes
    assert simulated == pytest.approx(report["peak"]["allocated_bytes"], rel=0.01)
    assert "lean" not in {candidate.id for candidate in candidates_for(run_of(report))}
