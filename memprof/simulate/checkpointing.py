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
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from memprof.errors import UsageError
from memprof.simulate.fakes import patched
from memprof.vocabulary import Category

if TYPE_CHECKING:
    from memprof.simulate.session import FakeSession

__all__ = ["choose_checkpointing", "offloading_to_host"]


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
