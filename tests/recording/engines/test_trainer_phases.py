"""Phases of trainers whose methods have other names than TRL's."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from memprof.recording.guard import NULL_GUARD, MethodPatcher
from memprof.recording.session import Session
from memprof.recording.trace.tensor_trace import TensorTrace
from memprof.recording.trainer_phases import TrainerPhases


class SwiftTrainer:
    """As ms-swift's: TRL's `_generate` is inherited and never called, the engine is two attributes down."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(4, 4)
        engine = SimpleNamespace(sleep=lambda: None, wake_up=lambda: None)
        self.engine = SimpleNamespace(engine=engine)

    def _generate(self) -> None: ...

    def _generate_completions(self, samples: list[int]) -> list[int]:
        self.engine.engine.wake_up()
        self.engine.engine.sleep()
        return samples

    def _compute_rewards_per_func(self, samples: list[int]) -> torch.Tensor:
        return torch.ones(len(samples))


def test_ms_swifts_methods_are_phases() -> None:
    trainer, seams = SwiftTrainer(), MethodPatcher(NULL_GUARD, lambda error: None)
    phases = TrainerPhases(trainer, seams)
    session = Session(TensorTrace(torch.device("cpu")))
    session.start()
    phases.current = session
    try:
        trainer._compute_rewards_per_func(trainer._generate_completions([1, 2]))
    finally:
        seams.restore()
        session.stop()
    marks = [m["phase"] for m in session.phases.to_plain(0, session.recorder.now_us()) if m["phase"] != "other"]
    assert marks == ["generate", "wake", "sleep", "reward"]
