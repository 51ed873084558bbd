"""Read stacks: for a reader without memprof's frames and those of what started it, and as calls of a model."""

from __future__ import annotations

import re
from functools import cache

import numpy as np

from memprof.frame_paths import FramePath, frame_path, recorded_own_folders
from memprof.snapshot.model import I64, Frame, Snapshot

# The lean trainer's frames stay: what they allocate is theirs.
_OWN = re.compile(r"memprof/(?!grpo/)")
# What stands above memprof's outermost frame: click, `python -m`, and the script that pip made of the command.
_STARTER = re.compile(r"click/|(?:.*/)?runpy\.py$|<frozen runpy>$|(?:.*/)?memprof(?:\.exe/__main__\.py|-script\.py)?$")
_MODULE = "torch/nn/modules/module.py"


class ReadableStacks:
    """Look up stacks of a snapshot as lines ``file:line function``, innermost first.

    memprof's own frames are left out, and the frames of click and Python that started ``memprof run``, the demo or a
    simulation. Attribution reads whole stacks; the snapshot keeps them. A stack that holds only such frames is written
    whole where memprof itself allocated, and is empty elsewhere.

    Args:
        snapshot: whose stacks they are; it names the folders of the memprof that recorded it.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._table = snapshot.stacks
        own = recorded_own_folders(snapshot.run.own_folders)
        self._path = cache(lambda file: frame_path(file, own))

    def of(self, stack: int) -> list[str]:
        """Return the lines of one stack by its number in the snapshot."""
        frames = self._table.of(stack)
        kept = [frame for frame in frames[: self._outermost(frames)] if not self.is_own(frame)]
        if not kept and frames and not self.is_own(frames[0]):
            return []
        return [str(frame) for frame in kept or frames]

    def _outermost(self, frames: list[Frame]) -> int:
        """Return how many frames are left without the outer ones that started memprof."""
        end = len(frames)
        while end and (self.is_own(frames[end - 1]) or _STARTER.match(self._path(frames[end - 1].file).path)):
            end -= 1
        started_by_memprof = any(self.is_own(frame) for frame in frames[end:])
        return end if started_by_memprof else len(frames)

    def is_own(self, frame: Frame) -> bool:
        """Tell whether a frame is memprof's own."""
        path: FramePath = self._path(frame.file)
        return path.rooted and _OWN.match(path.path) is not None


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
