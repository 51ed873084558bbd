"""Mark what the objects of the plain loops are, while they run under the tracer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.truth.trace.tracer import Tracer


def preparing(script: Any) -> Callable[[Tracer, Callable[[Any, str, Any], None]], None]:
    """Make what ``harness.trace_nano`` calls before a loop: it wraps the script's functions."""

    def prepare(tracer: Tracer, swap: Callable[[Any, str, Any], None]) -> None:
        held: dict[str, Any] = {}
        build, make_cache, judge = script.build, script.Layer.make_cache, script.judge

        def built(cfg: Any) -> Any:
            with tracer.switched(True):
                model, reference, optimizer = build(cfg)
            tracer.mark_module(model, "weights")
            if reference is not None:
                tracer.mark_module(reference, "reference_model")
            held["model"], held["optimizer"] = model, optimizer
            _mark_state(tracer, optimizer)
            tracer.set_base_phase("other")
            tracer.note("train")
            tracer.active = True
            return model, reference, optimizer

        def cached(self: Any, *args: Any) -> None:
            make_cache(self, *args)
            tracer.mark(self.keys, "kv_cache", "keys")
            tracer.mark(self.values, "kv_cache", "values")

        def after_backward(*_: Any) -> None:
            tracer.mark_gradients(held["model"].named_parameters())

        def after_step(_: Any, optimizer: Any, *__: Any) -> None:
            _mark_state(tracer, optimizer)
            for name, p in held["model"].named_parameters():
                tracer.mark(p, "weights", name, force=True)

        swap(script, "build", built)
        swap(script.Layer, "make_cache", cached)
        swap(script, "judge", tracer.wrap_phase(judge, "reference_logprobs"))
        swap(script, "roll", tracer.wrap_phase(script.roll, "generate"))
        swap(script, "learn", tracer.wrap_phase(script.learn, "forward"))
        swap(torch.Tensor, "backward", tracer.wrap_phase(torch.Tensor.backward, "backward", after_backward))
        for kind in (script.InPlaceAdam, script.OutOfPlaceAdam, script.Momentum, torch.optim.Adagrad):
            swap(kind, "step", tracer.wrap_phase(kind.step, "optimizer_step", after_step))

    return prepare


def _mark_state(tracer: Tracer, optimizer: Any) -> None:
    """Mark optimizer state: torch's own, and the tensors that a loop's optimizer has besides."""
    if isinstance(optimizer, torch.optim.Optimizer):
        tracer.mark_optimizer(optimizer)
    if hasattr(optimizer, "tensors"):
        for tensor in optimizer.tensors():
            tracer.mark(tensor, "optimizer_state", "state")
