"""Choose which activations are kept for backward, and where, by the libraries' own code, as their users switch it on.

``selective`` is TRL's policy (attention's outputs are saved, all else is recomputed); ``offloaded`` is transformers'
``offload`` option, which keeps each layer's input in pinned host memory. Both go in by replacing the model's
``gradient_checkpointing_enable``: TRL's GRPO trainer calls it again after every pass without gradients, with arguments
that torch's checkpoint would refuse if they named either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from memprof.compat import patching
from memprof.compat import torch as torch_names
from memprof.compat import transformers as transformers_names
from memprof.compat import trl as trl_names
from memprof.compat.patching import bind
from memprof.foreign import Kwargs
from memprof.simulate.recorder.session import FakeSession
from memprof.vocabulary import Category


def choose_checkpointing(model: Any, kind: str) -> None:
    """Make a model checkpoint in the way named, once its trainer enables it; ``none`` and ``full`` change nothing."""
    if kind == "selective":
        trl_names.SELECTIVE.get()(model)
    elif kind == "offloaded":
        _offload(model)


def _offload(model: Any) -> None:
    inner = transformers_names.OFFLOADED_CHECKPOINTING.of(model)

    def enable(_: Any, gradient_checkpointing_kwargs: Kwargs | None = None, **__: Any) -> None:
        inner(gradient_checkpointing_kwargs or {"use_reentrant": False}, 1, True)

    bind(model, transformers_names.CHECKPOINTING, enable)


@contextlib.contextmanager
def offloading_to_host(session: FakeSession) -> Iterator[None]:
    """Let torch's ``save_on_cpu`` move what it saves to pinned host memory and bring back a copy, while open.

    It does so on a device; on fake tensors, which all say ``cpu``, it would move nothing.
    """
    hooks: Any = torch_names.SAVED_HOOKS.get()

    class SaveOnHost(hooks):  # type: ignore[misc]
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

    with patching((torch_names.SAVE_ON_CPU, SaveOnHost), (transformers_names.SAVE_ON_CPU, SaveOnHost)):
        yield
