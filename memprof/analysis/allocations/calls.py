"""Tell from its stack which call of a model made an allocation."""

from __future__ import annotations

import numpy as np

from memprof.snapshot.model import I64, Snapshot

_MODULE = "torch/nn/modules/module.py"


def outermost_calls(snapshot: Snapshot) -> tuple[I64, I64]:
    """Number, for each stack, the place that calls its outermost module (-1: none), and its Python frames."""
    frames = snapshot.stacks.frames
    python = [f.file.endswith((".py", ".pyc", ".ipynb")) or f.file.startswith("<") for f in frames]
    call = {
        i
        for i, f in enumerate(frames)
        if f.function == "_call_impl" and f.file.replace("\\", "/").endswith(_MODULE)
    }  # fmt: skip
    places: dict[tuple[int, ...], int] = {}
    wholes: dict[tuple[int, ...], int] = {}
    found = np.full((2, len(snapshot.stacks.stacks)), -1, np.int64)
    for i, stack in enumerate(snapshot.stacks.stacks):
        own = tuple([f for f in stack if python[f]])
        found[1, i] = wholes.setdefault(own, len(wholes))
        if not call.isdisjoint(own):
            outermost = max(depth for depth, f in enumerate(own) if f in call)
            found[0, i] = places.setdefault(own[outermost + 1 :], len(places))
    return found[0], found[1]
