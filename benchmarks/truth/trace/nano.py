"""Mark what the hand-written loop's objects are, while it runs under the tracer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.truth.models import Shapes
from benchmarks.truth.trace.harness import moving
from benchmarks.truth.trace.tracer import Tracer


def nano_parameters(shapes: Shapes, positions: int) -> int:
    """Count the elements of the loop's own model (closed form, for the tests)."""
    q = shapes.heads * shapes.head_dim
    layer = 4 * shapes.hidden * q + 2 * shapes.hidden * shapes.ffn + shapes.ffn + 3 * shapes.hidden
    heads = 1 if shapes.tied else 2
    return shapes.layers * layer + shapes.hidden * (1 + positions) + heads * shapes.vocab * shapes.hidden


def preparing(script: Any) -> Callable[[Tracer, Callable[[Any, str, Any], None]], None]:
    """Make what ``harness.trace_nano`` calls before the loop: it wraps the script's functions."""

    def prepare(tracer: Tracer, swap: Callable[[Any, str, Any], None]) -> None:
        held: dict[str, Any] = {}
        deepcopy, setup, train, logps = script.copy.deepcopy, script.setup, script.train, script.get_logps

        def copied(value: Any) -> Any:
            with tracer.switched(True):
                return deepcopy(value)

        class _Copy:
            deepcopy = staticmethod(copied)

        def built(cfg: Any) -> Any:
            model, ref, optimizer = setup(cfg)
            tracer.mark_module(model, "weights")
            if ref is not None:
                tracer.mark_module(ref, "reference_model")
            held["model"], held["ref"] = model, ref
            return model, ref, optimizer

        def trained(*args: Any) -> None:
            tracer.set_base_phase("other")
            tracer.note("train")
            with tracer.switched(True):
                train(*args)

        def scored(model: Any, *args: Any) -> Any:
            if tracer.phase == "forward":
                return logps(model, *args)
            with tracer.within("reference_logprobs" if model is held["ref"] else "old_logprobs"):
                return logps(model, *args)

        swap(script, "copy", _Copy)
        swap(script, "to_device", moving(script.to_device))
        swap(script, "setup", built)
        swap(script, "train", trained)
        swap(script, "get_logps", scored)
        for name, phase in (("generate", "generate"), ("compute_rewards", "reward"), ("compute_loss", "forward")):
            swap(script, name, tracer.wrap_phase(getattr(script, name), phase))
        _mark_caches(script, tracer, swap)

        def after(*_: Any) -> None:
            tracer.mark_gradients(held["model"].named_parameters())

        swap(torch.Tensor, "backward", tracer.wrap_phase(torch.Tensor.backward, "backward", after))
        clip = tracer.wrap_phase(torch.nn.utils.clip_grad_norm_, "optimizer_step")
        swap(torch.nn.utils, "clip_grad_norm_", clip)

    return prepare


def _mark_caches(script: Any, tracer: Tracer, swap: Callable[[Any, str, Any], None]) -> None:
    init, append = script.StaticCache.__init__, script.GrowingCache.append

    def created(self: Any, *args: Any) -> None:
        init(self, *args)
        for buffer in self.kv:
            tracer.mark(buffer, "kv_cache", "both")

    def appended(self: Any, layer: int, k: Any, v: Any) -> Any:
        out = append(self, layer, k, v)
        for detail, held in (("keys", self.k[layer]), ("values", self.v[layer])):
            tracer.mark(held, "kv_cache", detail)
        return out

    swap(script.StaticCache, "__init__", created)
    swap(script.GrowingCache, "append", appended)
