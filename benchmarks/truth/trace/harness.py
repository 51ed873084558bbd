"""Run a real script under the tracer: phases, identities, and what a GPU would have done otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from benchmarks.truth.models import Shapes
from benchmarks.truth.trace.tracer import Tracer


class _NoScratch:
    """A stand-in for a Triton kernel: the same numbers by the torch code, whose scratch no GPU would allocate."""

    def __init__(self, tracer: Tracer, fold: Callable[..., None]) -> None:
        self.tracer, self.fold = tracer, fold

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            with self.tracer.switched(False):
                self.fold(*args, **kwargs)

        return launch


class _Cdiv:
    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)


@contextlib.contextmanager
def cuda_like(tracer: Tracer) -> Iterator[None]:
    """Set torch's defaults as on CUDA: foreach kernels, workspaces; module moves that copy."""
    original_apply = torch.nn.Module._apply
    engine = torch.autograd.graph._engine_run_backward

    def _apply(self: torch.nn.Module, fn: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(fn, "_seen", False):
            inner = fn

            def fn(tensor: torch.Tensor) -> torch.Tensor:
                result = inner(tensor)
                if tracer.phase == "load" and result.device.type != "meta" and _moves.depth:
                    tracer.adopt(result, "Module.to", 2)
                return result  # type: ignore[no-any-return]

            fn._seen = True
        return original_apply(self, fn, *args, **kwargs)  # type: ignore[no-untyped-call]

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        tracer.in_backward += 1
        tracer.note("backward")
        try:
            return engine(*args, **kwargs)
        finally:
            tracer.in_backward -= 1

    checkpoint = torch.utils.checkpoint.checkpoint

    def checkpointed(function: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            tracer.mark_boundary(args)
        return checkpoint(function, *args, **kwargs)

    supported = torch.utils._foreach_utils._get_foreach_kernels_supported_devices
    with contextlib.ExitStack() as stack:

        def swap(target: Any, name: str, new: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, new))

        def foreach() -> list[str]:
            return [*supported(), "cpu"]

        swap(torch.nn.Module, "_apply", _apply)
        swap(torch.autograd, "_engine_run_backward", run_backward)
        swap(torch.autograd.graph, "_engine_run_backward", run_backward)
        swap(torch.utils.checkpoint, "checkpoint", checkpointed)
        import transformers.modeling_utils as modeling

        if hasattr(modeling, "checkpoint"):
            swap(modeling, "checkpoint", checkpointed)
        swap(torch.utils._foreach_utils, "_get_foreach_kernels_supported_devices", foreach)
        import torch.optim.optimizer as optimizer_module

        swap(optimizer_module, "_get_foreach_kernels_supported_devices", foreach)
        yield


class _Moves:
    """Depth of calls that on a GPU machine copy a model's tensors to the device."""

    depth = 0

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


_moves = _Moves()


def moving(fn: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _moves.on():
            return fn(*args, **kwargs)

    return wrapped


def _patch_loading(tracer: Tracer, swap: Callable[[Any, str, Any], None]) -> None:
    """Make from_pretrained with a device map materialise on the device, in the loader's threads."""
    import transformers.core_model_loading as loading
    import transformers.modeling_utils as modeling
    import trl.trainer.grpo_trainer as grpo
    from transformers import PreTrainedModel

    materialize = loading._materialize_copy
    warmup = modeling.caching_allocator_warmup
    create = grpo.create_model_from_path
    from_pretrained = PreTrainedModel.from_pretrained.__func__
    depth = [0]

    def _materialize_copy(tensor: Any, device: Any = None, dtype: Any = None) -> torch.Tensor:
        out: torch.Tensor = materialize(tensor, device, dtype)
        if depth[0]:
            tracer.adopt(out, "materialize", 2)
        return out

    def loaded(cls: Any, *args: Any, **kwargs: Any) -> Any:
        on_device = kwargs.get("device_map") is not None
        depth[0] += on_device
        try:
            model = from_pretrained(cls, *args, **kwargs)
        finally:
            depth[0] -= on_device
        if on_device:
            for tensor in [*model.parameters(), *model.buffers()]:
                tracer.adopt(tensor, "buffer", 2)
            tracer.note("loaded")
        return model

    def warmed(*args: Any, **kwargs: Any) -> Any:
        tracer.warmups.append((len(tracer.events), tracer.capture(1)))
        return warmup(*args, **kwargs)

    def created(*args: Any, **kwargs: Any) -> Any:
        # What TRL picks where there is a GPU is "auto": the loader puts parameters on the device itself.
        return create(*args, **{"device_map": "cpu", **kwargs})

    swap(loading, "_materialize_copy", _materialize_copy)
    swap(PreTrainedModel, "from_pretrained", classmethod(loaded))
    swap(modeling, "caching_allocator_warmup", warmed)
    swap(grpo, "create_model_from_path", created)


def _patch_trl(tracer: Tracer, shapes: Shapes, trainer: Any, swap: Callable[[Any, str, Any], None]) -> None:
    """Take TRL's CUDA path: compacted tokens, kernels that fold tiles without scratch, tiles scaled down."""
    import trl.kernels.chunked_logprob as chunked
    import trl.trainer.utils as utils
    from trl import GRPOTrainer

    addmm = chunked._addmm_fp32

    def _addmm_fp32(*args: Any) -> None:
        with tracer.switched(False):
            addmm(*args)

    yes = lambda device: True  # noqa: E731
    swap(chunked, "_use_triton", yes)
    swap(utils, "_use_triton", yes)
    swap(chunked, "_addmm_fp32", _addmm_fp32)
    swap(chunked, "_forward_kernel", _NoScratch(tracer, chunked._forward_tile))
    swap(chunked, "_backward_kernel", _NoScratch(tracer, chunked._backward_tile))
    if not hasattr(chunked, "triton"):
        chunked.triton = _Cdiv
    swap(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", shapes.tiny_tile if shapes.tiles > 1 else shapes.tiny_vocab)

    _patch_scoring(tracer, GRPOTrainer, swap)
    if trainer is not GRPOTrainer:
        _patch_scoring(tracer, trainer, swap)
    swap(GRPOTrainer, "_generate", tracer.wrap_phase(GRPOTrainer._generate, "generate"))
    swap(GRPOTrainer, "_calculate_rewards", tracer.wrap_phase(GRPOTrainer._calculate_rewards, "reward"))
    swap(GRPOTrainer, "compute_loss", tracer.wrap_phase(GRPOTrainer.compute_loss, "forward"))


def _patch_scoring(tracer: Tracer, trainer: Any, swap: Callable[[Any, str, Any], None]) -> None:
    """Set the phase by whose log-probs are computed: none in the loss, else the reference's or old policy's."""
    logps = trainer._get_per_token_logps_and_entropies

    def get_logps(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if tracer.phase == "forward":
            return logps(self, model, *args, **kwargs)
        adapters_off = any(getattr(m, "disable_adapters", False) is True for m in model.modules())
        phase = "reference_logprobs" if model is self.ref_model or adapters_off else "old_logprobs"
        with tracer.within(phase):
            return logps(self, model, *args, **kwargs)

    swap(trainer, "_get_per_token_logps_and_entropies", get_logps)


def _patch_trainer(tracer: Tracer, swap: Callable[[Any, str, Any], None]) -> None:
    """Mark phases and identities at the seams of transformers' Trainer and accelerate."""
    import accelerate
    import transformers
    from trl import GRPOTrainer

    init, train = GRPOTrainer.__init__, GRPOTrainer.train
    box: dict[str, Any] = {}

    def initialised(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        models = [self.model, self.ref_model, *(f for f in self.reward_funcs if isinstance(f, torch.nn.Module))]
        for model in (m for m in models if m is not None):
            for tensor in [*model.parameters(), *model.buffers()]:
                tracer.adopt(tensor, "load", 2)
        tracer.mark_module(self.model, "weights", adapters=True)
        for category, model in [("reference_model", self.ref_model), *(("reward_model", m) for m in models[2:])]:
            if model is not None:
                tracer.mark_module(model, category)
        box["trainer"] = self

    def trained(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracer.set_base_phase("other")
        tracer.note("train")
        with tracer.switched(True):
            return train(self, *args, **kwargs)

    def after_backward(*_: Any) -> None:
        tracer.mark_gradients(box["trainer"].model.named_parameters())

    swap(GRPOTrainer, "__init__", initialised)
    swap(GRPOTrainer, "train", trained)
    swap(transformers.Trainer, "_move_model_to_device", moving(transformers.Trainer._move_model_to_device))
    accelerator = accelerate.Accelerator
    swap(accelerator, "prepare_model", moving(accelerator.prepare_model))
    swap(accelerator, "backward", tracer.wrap_phase(accelerator.backward, "backward", after_backward))
    swap(accelerator, "clip_grad_norm_", tracer.wrap_phase(accelerator.clip_grad_norm_, "optimizer_step"))
    _patch_optimizer(tracer, swap)

    mark_caches(tracer, swap)


def mark_caches(tracer: Tracer, swap: Callable[[Any, str, Any], None]) -> None:
    """Mark what transformers' caches store."""
    from transformers.cache_utils import DynamicLayer

    update = DynamicLayer.update

    def updated(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = update(self, *args, **kwargs)
        tracer.mark(self.keys, "kv_cache", "keys")
        tracer.mark(self.values, "kv_cache", "values")
        return out

    swap(DynamicLayer, "update", updated)


def _patch_optimizer(tracer: Tracer, swap: Callable[[Any, str, Any], None]) -> None:
    """Annotate steps as CUDA histories do; mark state when the step ends; zero_grad belongs to it."""

    def stepped(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            with tracer.within("optimizer_step"):
                tracer.note(f"START:Optimizer.step#{name}.step")
                out = original(self, *args, **kwargs)
                tracer.note(f"END:Optimizer.step#{name}.step")
            tracer.mark_optimizer(self)
            return out

        return step

    for kind, original in [(k, k.step) for k in (torch.optim.AdamW, torch.optim.SGD)]:
        swap(kind, "step", stepped(original, kind.__name__))
    zero = torch.optim.Optimizer.zero_grad
    swap(torch.optim.Optimizer, "zero_grad", tracer.wrap_phase(zero, "optimizer_step"))


def _patch_peft(tracer: Tracer, swap: Callable[[Any, str, Any], None]) -> None:
    """Make adapters on the CPU, then move and cast them to their base layer's: two births on a GPU."""
    import peft.tuners.tuners_utils as tuners
    from peft.tuners.tuners_utils import BaseTunerLayer

    cast, move = tuners.cast_adapter_dtype, BaseTunerLayer._move_adapter_to_device_of_base_layer

    def on_device(module: Any) -> bool:
        return any(tracer.number_of(p) is not None for p in module.parameters())

    def casted(model: Any, *args: Any, **kwargs: Any) -> Any:
        with tracer.switched(on_device(model)):
            return cast(model, *args, **kwargs)

    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _moves.on() if on_device(self.get_base_layer()) else contextlib.nullcontext():
            return move(self, *args, **kwargs)

    swap(tuners, "cast_adapter_dtype", casted)
    swap(BaseTunerLayer, "_move_adapter_to_device_of_base_layer", moved)


def trace_trl(shapes: Shapes, run: Callable[[], Any], lora: bool = False, trainer: Any = None) -> Tracer:
    """Run ``run`` (a TRL script's main) under a tracer; ``trainer`` is the script's own class, if it has one."""
    from trl import GRPOTrainer

    tracer = Tracer()
    with contextlib.ExitStack() as stack:
        stack.enter_context(cuda_like(tracer))

        def swap(target: Any, name: str, new: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, new))

        _patch_loading(tracer, swap)
        _patch_trl(tracer, shapes, trainer or GRPOTrainer, swap)
        _patch_trainer(tracer, swap)
        if lora:
            _patch_peft(tracer, swap)
        with tracer:
            run()
        tracer.active = False
    return tracer


def trace_nano(run: Callable[[], Any], prepare: Callable[[Tracer, Callable[[Any, str, Any], None]], None]) -> Tracer:
    """Run a hand-written loop; ``prepare`` marks what its objects are."""
    tracer = Tracer()
    with contextlib.ExitStack() as stack:
        stack.enter_context(cuda_like(tracer))

        def swap(target: Any, name: str, new: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, new))

        prepare(tracer, swap)
        _patch_optimizer(tracer, swap)
        with tracer:
            run()
        tracer.active = False
    return tracer
