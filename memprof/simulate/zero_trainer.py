"""The trainer under ZeRO: its backward, its optimizer and what it gathers go through the modelled engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from memprof.simulate.fakes import patched
from memprof.simulate.settings import Settings
from memprof.simulate.zero import ZeroEngine, ZeroOptimizer
from memprof.simulate.zero3 import Zero3Engine
from memprof.vocabulary import Category

if TYPE_CHECKING:
    from memprof.simulate.session import FakeSession

__all__ = ["attach_zero", "gathering_for_zero"]


def attach_zero(trainer: Any, settings: Settings, session: FakeSession) -> ZeroEngine:
    """Divide a trainer's model, as ``deepspeed.initialize`` does.

    For stage 3 the trainer was built with recording paused, since its parameters are divided while they are loaded;
    recording goes on here. Without it a reference and a reward model stay whole, as TRL asks of DeepSpeed.
    """
    recorder = session.fake_recorder
    for parameter in trainer.model.parameters():
        if parameter.dtype is not torch.bfloat16:
            parameter.data = parameter.data.to(torch.bfloat16)
    engine: ZeroEngine
    if settings.whole_nowhere:
        recorder.paused -= 1
        engine = stage3 = Zero3Engine(trainer.model, settings, session)
        others = [(trainer.ref_model, Category.REFERENCE_MODEL)]
        others += [(m, Category.REWARD_MODEL) for m in trainer.reward_funcs if isinstance(m, torch.nn.Module)]
        for model, category in others:
            if model is not None:
                stage3.add_model(model, category)
        for model in (trainer.model, *(m for m, _ in others)):
            for buffer in model.buffers() if model is not None else ():
                recorder.birth(buffer)
    else:
        engine = ZeroEngine(trainer.model, settings, session)
    _go_through(trainer, engine)
    session.notes.append(
        f"ZeRO-{engine.stage} is modelled, not executed: DeepSpeed's rules of release 0.19, with its default buckets."
    )
    return engine


def _go_through(trainer: Any, engine: ZeroEngine) -> None:
    backward = trainer.accelerator.backward

    def divided(loss: Any, **kwargs: Any) -> Any:
        return engine.backward(lambda: backward(loss, **kwargs))

    def create_optimizer(model: Any = None) -> Any:
        kind, arguments = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
        trainer.optimizer = ZeroOptimizer(engine, kind, arguments)
        return trainer.optimizer

    trainer.accelerator.backward = divided
    trainer.create_optimizer = create_optimizer


@contextlib.contextmanager
def gathering_for_zero(engine: ZeroEngine | None) -> Iterator[None]:
    """While open, TRL gathers the output head's weights for its loss where stage 3 has divided them."""
    if not isinstance(engine, Zero3Engine):
        yield
        return
    import trl.trainer.utils as utils

    with patched((utils, "maybe_gather_lm_head_ctx", engine.gathered_head)):
        yield
