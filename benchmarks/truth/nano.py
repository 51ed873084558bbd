"""Runs the hand-written loop under the tracer, marking what its objects are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.truth.emit import Stream, build_stream
from benchmarks.truth.harness import moving, trace_nano
from benchmarks.truth.models import Shapes, scale_for
from benchmarks.truth.tracer import Tracer

if TYPE_CHECKING:
    from benchmarks.truth.cases import Case

__all__ = ["nano_parameters", "run_nano"]


def nano_parameters(shapes: Shapes, positions: int) -> int:
    """Elements of the loop's own model (closed form, for the tests)."""
    q = shapes.heads * shapes.head_dim
    layer = 4 * shapes.hidden * q + 2 * shapes.hidden * shapes.ffn + shapes.ffn + 3 * shapes.hidden
    heads = 1 if shapes.tied else 2
    return shapes.layers * layer + shapes.hidden * (1 + positions) + heads * shapes.vocab * shapes.hidden


def _prepare(script: Any) -> Callable[[Tracer, Callable[[Any, str, Any], None]], None]:
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


def run_nano(case: Case, layers: int | None = None) -> tuple[Stream, dict[str, Any]]:
    """The stream of one run of the loop, and what its truth file says about it."""
    from benchmarks.truth.scripts import nano_grpo

    assert case.nano is not None
    shapes = replace(case.model, layers=layers) if layers else case.model
    positions = case.prompt + case.completion
    width = shapes.heads * shapes.tiny_head_dim
    config = {
        "model": {"vocab": shapes.tiny_vocab, "dim": shapes.tiny_hidden, "layers": shapes.layers,
                  "heads": shapes.heads, "head_dim": shapes.tiny_head_dim, "hidden": shapes.tiny_ffn,
                  "positions": positions, "tied": shapes.tied},
        "device": "cpu", "dtype": torch.float32, "cache_dtype": torch.float32, "seed": 5, "steps": 2, "group": 4,
        "beta": 0.04, "optimizer": "adamw_foreach", "cache": "static", "autocast": False, "batch": 8, "micro": 8,
        "prompt": case.prompt, "new_tokens": case.completion, **case.nano,
    }
    for name in ("dtype", "cache_dtype"):
        if isinstance(config[name], str):
            config[name] = getattr(torch, str(config[name]))
    tracer = trace_nano(lambda: nano_grpo.main(config), _prepare(nano_grpo))  # type: ignore[no-untyped-call]
    batches = {2**i for i in range(8) if 2**i <= int(config["batch"])} | {int(config["micro"])}
    wide = replace(shapes, extra={**shapes.extra, 3 * width: 3 * shapes.heads * shapes.head_dim})
    scale = scale_for([wide], case.tokens, case.prompt, case.completion, batches)
    stream = build_stream(tracer, scale)
    guesses = {f"{shape}[{at}]": n for (shape, at), n in scale.guessed.most_common(8)}
    return stream, {"run": case.name, "model": shapes.name, "versions": {"torch": version("torch")},
                    "about": case.about, "tokens_per_tiny_token": case.tokens, "guessed_extents": guesses}
