"""Let TRL, transformers and accelerate train on fake tensors: replace what needs values, a GPU or Triton."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memprof.compat import accelerate as accelerate_names
from memprof.compat import patching
from memprof.compat import torch as torch_names
from memprof.compat import transformers as transformers_names
from memprof.compat import trl as trl_names
from memprof.compat.targets import Target
from memprof.config.settings import Settings, TrainerSettings
from memprof.simulate.recorder.session import FakeSession
from memprof.simulate.trainer.lean import lean_world
from memprof.simulate.trainer.loading import load_model
from memprof.simulate.trainer.models import build_model
from memprof.simulate.trainer.rollout import counted, cutting


@contextlib.contextmanager
def trl_on_fakes(settings: Settings, config: Any, session: FakeSession) -> Iterator[None]:
    """Let the trainer of these settings be built and run, while open; its reference is a model of ``config``."""

    def reference(*_: Any, **__: Any) -> Any:
        if settings.device == "cuda" and settings.gpus == 1:
            return load_model(config, settings.weights_dtype, session)
        return build_model(config, settings.weights_dtype)

    with contextlib.ExitStack() as stack:
        named = (trl_names.CREATE_MODEL, trl_names.CREATE_DPO_REFERENCE, trl_names.CREATE_RLOO_REFERENCE)
        loading = [(target, reference) for target in named]
        stack.enter_context(patching(*loading, *_without_values(settings, session)))
        if settings.device == "cuda":
            stack.enter_context(_triton_kernels(session))
            stack.enter_context(_foreach_as_on_cuda())
            stack.enter_context(_losses_scaled())
            stack.enter_context(_seeds_on_host(session))
            stack.enter_context(_step_counts_on_host(session))
        if settings.lean:
            stack.enter_context(lean_world(reference, session, settings.device))
        yield


def _without_values(settings: TrainerSettings, session: FakeSession) -> list[tuple[Target, Any]]:
    """List what asks for values: whether a mask is all ones, and when sampling ends."""

    def fast_all(tensor: Any) -> Any:
        answer = tensor.sum() == tensor.numel()
        answer._memprof_scalar = settings.padding == "none"
        return answer

    return [
        (transformers_names.MASK_IS_ALL, fast_all),
        (transformers_names.SAMPLE, counted(transformers_names.SAMPLE.get())),
        (transformers_names.UNFINISHED, cutting(session.fake_recorder)),
        (transformers_names.COUNTED_FLOS, lambda *_: 0),  # it asks bitsandbytes how large 4-bit weights are
    ]


@contextlib.contextmanager
def _triton_kernels(session: FakeSession) -> Iterator[None]:
    """Take TRL's path through its Triton kernels, which allocate nothing, whether Triton is installed or not.

    What they compute and read is counted as the session's work.
    """

    def count(func: Any, given: tuple[Any, ...]) -> None:
        session.fake_recorder.work.see(func, given, {}, None)

    def add_product(*given: Any) -> None:
        count(torch.ops.aten.addmm.default, given)

    always: Callable[[Any], bool] = lambda device: True  # noqa: E731
    module: Any = sys.modules[trl_names.FORWARD_KERNEL.module]
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            patching(
                (trl_names.USE_TRITON, always),
                (trl_names.USE_TRITON_IN_HEAD, always),
                (trl_names.FORWARD_KERNEL, _NoKernel(count)),
                (trl_names.BACKWARD_KERNEL, _NoKernel(count)),
                (trl_names.ADD_PRODUCT, add_product),
            )
        )
        if not hasattr(module, "triton"):
            module.triton = types.SimpleNamespace(cdiv=lambda a, b: -(-a // b))
            stack.callback(delattr, module, "triton")
        yield


class _NoKernel:
    """Stand for a Triton kernel, which allocates nothing whatever it computes; call ``count`` for its work."""

    def __init__(self, count: Callable[[Any, tuple[Any, ...]], None]) -> None:
        self._count = count

    def __getitem__(self, grid: Any) -> Any:
        return lambda *given, **_: self._count(self, given)


@contextlib.contextmanager
def _foreach_as_on_cuda() -> Iterator[None]:
    """Let optimizers and gradient clipping take their multi-tensor path, which on the CPU they do not."""
    supported: Callable[[], list[str]] = lambda: ["cuda", "cpu"]  # noqa: E731
    lists = (torch_names.FOREACH_TYPES.get(), torch_names.FOREACH_TYPES_OF_NORMS.get())
    fake = torch_names.FAKE_TENSOR.get()
    for types_taken in lists:
        types_taken.append(fake)
    try:
        with patching((torch_names.FOREACH_DEVICES, supported), (torch_names.FOREACH_DEVICES_IN_OPTIMIZERS, supported)):
            yield
    finally:
        for types_taken in lists:
            types_taken.remove(fake)


@contextlib.contextmanager
def _losses_scaled() -> Iterator[None]:
    """Let accelerate scale losses for fp16, while open; where it sees a CPU, and fake tensors seem to be on one, it
    would compute in float32."""
    make_accelerator: Any = transformers_names.MAKE_ACCELERATOR.get()

    @functools.wraps(make_accelerator)
    def made(self: Any) -> None:
        make_accelerator(self)
        if self.accelerator.mixed_precision == "fp16":
            setattr(self.accelerator, accelerate_names.NATIVE_AMP.name, True)
            setattr(self.accelerator, accelerate_names.SCALER.name, torch.amp.GradScaler("cpu"))

    step_if_finite: Any = torch_names.STEP_IF_FINITE.get()

    def steps(self: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        for found in optimizer_state["found_inf_per_device"].values():
            found._memprof_scalar = 0.0
        return step_if_finite(self, optimizer, optimizer_state, *args, **kwargs)

    with patching((transformers_names.MAKE_ACCELERATOR, made), (torch_names.STEP_IF_FINITE, steps)):
        yield


@contextlib.contextmanager
def _seeds_on_host(session: FakeSession) -> Iterator[None]:
    """Leave out the seed that each pass over a data loader draws: it is the host's, on whatever device one trains."""
    begin: Any = torch_names.LOADER_ITERATOR.get()

    def unseen(self: Any, loader: Any) -> None:
        with session.fake_recorder.storages.unseen():
            begin(self, loader)

    with patching((torch_names.LOADER_ITERATOR, unseen)):
        yield


@contextlib.contextmanager
def _step_counts_on_host(session: FakeSession) -> Iterator[None]:
    """Keep each parameter's count of steps off the device, as Adam and RMSprop do unless fused or capturable."""

    def counted_on_host(initialise: Any) -> Any:
        def initialised(self: Any, group: Any, *lists: Any) -> Any:
            new = [p for p in group["params"] if p.grad is not None and not self.state[p]]
            answer = initialise(self, group, *lists)
            if not (group.get("fused") or group["capturable"]):
                for parameter in new:
                    session.fake_recorder.storages.disown(self.state[parameter]["step"])
            return answer

        return initialised

    states = (torch_names.ADAM_STATE, torch_names.ADAMW_STATE, torch_names.RMSPROP_STATE)
    with patching(*((t, counted_on_host(t.get())) for t in states)):
        yield


@contextlib.contextmanager
def own_accelerate_state() -> Iterator[None]:
    """Give the simulation a state of accelerate of its own, and leave the process's as it was."""
    names = (
        accelerate_names.ACCELERATOR_STATE,
        accelerate_names.SHARED_GRADIENT_STATE,
        accelerate_names.PARTIAL_STATE,
    )
    states: list[dict[str, Any]] = [target.get() for target in names]
    saved = [dict(state) for state in states]
    for state in states:
        state.clear()
    try:
        yield
    finally:
        for state, before in zip(states, saved, strict=True):
            state.clear()
            state.update(before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence what the libraries have to say about a model without weights."""
    names = ("transformers", "trl", "peft", "accelerate", "torch")
    before = [(logging.getLogger(n), logging.getLogger(n).level) for n in names]
    try:
        for logger, _ in before:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in before:
            logger.setLevel(level)
