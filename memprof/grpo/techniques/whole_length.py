"""Keep rotary frequencies those of the whole micro-batch, where a model chooses them by a forward's longest row.

``longrope`` has a set of frequencies for short and one for long forwards; ``dynamic`` computes them from the length.
TRL's forward is as long as its padded batch, a piece's is not: pieces are told of the last position of the batch too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from memprof.grpo.micro_batch_inputs import MicroBatch
from memprof.grpo.techniques.layers import replace_forward

_FOUND: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()


def follows_length(model: nn.Module) -> list[nn.Module]:
    """Find the rotary embeddings of ``model`` whose frequencies depend on the longest position of a forward."""
    if model not in _FOUND:
        _FOUND[model] = [module for module in model.modules() if _by_length(getattr(module, "rope_type", None))]
    return _FOUND[model]


@contextmanager
def frequencies_of(model: nn.Module, inputs: MicroBatch) -> Iterator[None]:
    """Rotate positions in forwards as one forward of the whole micro-batch would, padding included."""
    last = inputs["prompt_ids"].shape[1] + inputs["completion_ids"].shape[1] - 1
    undo = [replace_forward(module, functools.partial(_with, last)) for module in follows_length(model)]
    try:
        yield
    finally:
        for take_off in undo:
            take_off()


def _by_length(kind: Any) -> bool:
    """Tell whether a module's ``rope_type``, or one of several, makes frequencies depend on the length."""
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return any(one == "longrope" or "dynamic" in str(one) for one in kinds)


def _with(
    last: int,
    _module: nn.Module,
    inner: Callable[..., Any],
    x: Any,
    position_ids: torch.Tensor,
    *args: Any,
    **more: Any,
) -> Any:
    """Rotate ``position_ids`` ``[..., tokens]`` with the position ``last`` beside them; drop its rotation."""
    ahead = position_ids.new_full((*position_ids.shape[:-1], 1), last)
    # What pads a short row on the right stands behind the batch's last position, and is seen by nobody.
    found = inner(x, torch.cat([position_ids.clamp(max=last), ahead], dim=-1), *args, **more)
    return tuple(part[..., :-1, :] for part in found) if isinstance(found, tuple) else found[..., :-1, :]
