"""Which activations are kept for backward, and where: the libraries' own code, switched on as their users do.

``selective`` is TRL's policy (attention's outputs are saved, all else is recomputed); ``offloaded`` is transformers'
``offload`` option, which keeps each layer's input in pinned host memory. Both go in by replacing the model's
``gradient_checkpointing_enable``: TRL's GRPO trainer calls it again after every pass without gradients, with arguments
that torch's checkpoint would refuse if they named either.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import types
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from memprof.config.settings import Settings
from memprof.errors import UsageError
from memprof.simulate.trainer.lean import lean_on_cuda, reference_of
from memprof.simulate.trainer.models import build_model
from memprof.simulate.trainer.rollout import counted, unfinished
from memprof.simulate.world.fakes import patched
from memprof.vocabulary import Category

if TYPE_CHECKING:
    from memprof.simulate.recorder.session import FakeSession

__all__ = [
    "choose_checkpointing",
    "offloading_to_host",
    "own_accelerate_state",
    "quiet",
    "trl_on_fakes",
]

def choose_checkpointing(model: Any, kind: str) -> None:
    """Make a model checkpoint in the way named, once its trainer enables it; ``none`` and ``full`` change nothing.

    Raises:
        UsageError: the installed TRL or transformers cannot do it.
    """
    if kind == "selective":
        try:
            from trl.models import enable_selective_activation_checkpointing
        except ImportError:
            raise UsageError("--gradient-checkpointing selective runs TRL's own policy: install TRL 1.16.") from None
        enable_selective_activation_checkpointing(model)
    elif kind == "offloaded":
        _offload(model)


def _offload(model: Any) -> None:
    original = model.gradient_checkpointing_enable
    inner = getattr(model, "_activation_checkpointing_enable", None)
    if inner is None or "offload" not in inspect.signature(inner).parameters:
        raise UsageError("--gradient-checkpointing offloaded runs transformers' own option: install transformers 5.23.")

    @functools.wraps(original)
    def enable(gradient_checkpointing_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
        inner(gradient_checkpointing_kwargs or {"use_reentrant": False}, 1, True)

    model.gradient_checkpointing_enable = enable


@contextlib.contextmanager
def offloading_to_host(session: FakeSession) -> Iterator[None]:
    """While open, torch's ``save_on_cpu`` moves what it saves to pinned host memory and brings back a copy, as it does
    on a device; on fake tensors, which all say ``cpu``, it would move nothing."""
    import torch.autograd.graph as graph
    from transformers import modeling_utils

    class SaveOnHost(graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool = False, device_type: str = "cuda") -> None:
            super().__init__(self._pack, self._unpack)

        @staticmethod
        def _pack(tensor: Any) -> Any:
            held = torch.empty(tensor.size(), dtype=tensor.dtype, pin_memory=True)
            held.copy_(tensor)
            return held

        @staticmethod
        def _unpack(held: Any) -> Any:
            back = torch.empty_like(held)
            session.book.claim(back, Category.ACTIVATIONS, "boundary", "brought back from the host")
            return back

    with patched((graph, "save_on_cpu", SaveOnHost), (modeling_utils, "save_on_cpu", SaveOnHost)):
        yield


@contextlib.contextmanager
def trl_on_fakes(settings: Settings, config: Any, session: FakeSession | None = None) -> Iterator[None]:
    import trl.kernels.chunked_logprob as kernels
    import trl.trainer.grpo_trainer as grpo
    import trl.trainer.utils as utils
    from transformers import masking_utils
    from transformers.generation.utils import GenerationMixin

    def reference(*_: Any, **__: Any) -> Any:
        return build_model(config, settings.weights_dtype, attention="sdpa")

    def fast_all(mask: Any) -> Any:
        answer = mask.sum() == mask.numel()
        answer._memprof_scalar = settings.padding == "none"
        return answer

    changes: list[tuple[Any, str, Any]] = [
        (grpo, "create_model_from_path", reference),
        (masking_utils, "fast_all", fast_all),
        (GenerationMixin, "_sample", counted(GenerationMixin._sample)),
        (GenerationMixin, "_has_unfinished_sequences", unfinished),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(*changes))
        if settings.device == "cuda":
            stack.enter_context(
                patched(
                    (kernels, "_use_triton", lambda device: True),
                    (utils, "_use_triton", lambda device: True),
                    (kernels, "_forward_kernel", _NoKernel()),
                    (kernels, "_backward_kernel", _NoKernel()),
                    (kernels, "_addmm_fp32", lambda acc, a, b: None),
                )
            )
            if not hasattr(kernels, "triton"):
                kernels.triton = types.SimpleNamespace(cdiv=lambda a, b: -(-a // b))
                stack.callback(delattr, kernels, "triton")
            stack.enter_context(_foreach_as_on_cuda())
        if settings.recipe == "lean":
            on_cuda = settings.device == "cuda"
            stack.enter_context(patched(*reference_of(reference, session if on_cuda else None)))
            stack.enter_context(patched(*(lean_on_cuda(session) if on_cuda else ())))
        yield


@contextlib.contextmanager
def own_accelerate_state() -> Iterator[None]:
    """accelerate keeps one state a process; a simulation has its own and leaves the process's as it was."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    kinds = (AcceleratorState, GradientState, PartialState)
    saved = [dict(kind._shared_state) for kind in kinds]
    for kind in kinds:
        kind._shared_state.clear()
    try:
        yield
    finally:
        for kind, state in zip(kinds, saved, strict=True):
            kind._shared_state.clear()
            kind._shared_state.update(state)


class _NoKernel:
    """A Triton kernel: whatever it computes, it allocates nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: None


@contextlib.contextmanager
def _foreach_as_on_cuda() -> Iterator[None]:
    """Optimizers and gradient clipping take their multi-tensor path, which on the CPU they do not."""
    import torch.optim.optimizer as optimizer
    import torch.utils._foreach_utils as foreach
    from torch._subclasses.fake_tensor import FakeTensor

    supported = lambda: ["cuda", "cpu"]  # noqa: E731
    optimizer._foreach_supported_types.append(FakeTensor)
    try:
        with patched(
            (foreach, "_get_foreach_kernels_supported_devices", supported),
            (optimizer, "_get_foreach_kernels_supported_devices", supported),
        ):
            yield
    finally:
        optimizer._foreach_supported_types.remove(FakeTensor)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A simulation prints what it found, not what transformers has to say about a model without weights."""
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
