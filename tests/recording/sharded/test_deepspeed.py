"""Phases under DeepSpeed, whose engine steps the optimizer inside ``Accelerator.backward``.

accelerate's own code calls the engine; only the engine is a stand-in, as DeepSpeed's needs a GPU.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper

from memprof.analysis.analysis import analyze
from memprof.recording.guard import NULL_GUARD, MethodPatcher
from memprof.recording.session import Session
from memprof.recording.trace.tensor_trace import TensorTrace
from memprof.recording.trainer_phases import TrainerPhases


class Engine:
    """What accelerate calls of DeepSpeed's engine."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.boundary = False

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.boundary = is_boundary

    def backward(self, loss: torch.Tensor, **_: Any) -> None:
        loss.backward()

    def step(self) -> None:
        if self.boundary:
            self.optimizer.step()
            self.optimizer.zero_grad()


def failed(error: BaseException) -> None:
    raise error


def test_the_step_inside_backward_is_the_optimizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(64, 64)
    accelerator = Accelerator(cpu=True)
    monkeypatch.setitem(vars(accelerator.state), "distributed_type", DistributedType.DEEPSPEED)
    seams = MethodPatcher(NULL_GUARD, failed)
    trainer_phases = TrainerPhases(SimpleNamespace(accelerator=accelerator, model=model), seams)
    # The trainer prepares its engine after the callback has come.
    monkeypatch.setattr(accelerator, "deepspeed_engine_wrapped", DeepSpeedEngineWrapper(Engine(model)), raising=False)
    session = Session(TensorTrace(torch.device("cpu")))
    session.add_model(model, "policy")
    session.start()
    trainer_phases.current = session
    try:
        for step in (1, 2):
            session.set_step(step)
            accelerator.backward(model(torch.ones(8, 64)).sum())
            trainer_phases.end_step()
    finally:
        seams.restore()
        session.stop()
    session.write(tmp_path / "run.pickle")
    marks = [m["phase"] for m in session.phases.to_plain(0, session.recorder.now_us()) if m["step"] == 2]
    assert [m for m in marks if m != "other"][:2] == ["backward", "optimizer_step"]
    report = analyze(tmp_path / "run.pickle")
    state = [a for a in report.explain("peak") if a.category == "optimizer_state"]
    assert sum(a.bytes for a in state) >= 2 * 4 * 64 * 65
    assert {a.phase for a in state} == {"optimizer_step"}
    gradients = [a for a in report.explain("peak") if a.category == "gradients"]
    assert {a.phase for a in gradients} == {"backward"}
    assert "step" not in vars(accelerator.deepspeed_engine_wrapped.engine)
