"""Capture stacks cheaply when something is allocated, and make them readable in bulk when the recording ends.

``torch.utils._traceback.CapturedTraceback`` captures a stack in one or two microseconds, but its own formatting
costs a hundred times what symbolising all of them at once does; hence the two layers here.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

from memprof.compat.patching import Patches
from memprof.compat.torch import GATHER_STACK, LAZY_MODULES, SYMBOLIZE

_BATCH = 20_000
_COMPILER = "torch._inductor"
_HERE = os.path.dirname(os.path.abspath(__file__))
_OURS = (_HERE + os.sep, os.path.join(os.path.dirname(_HERE), "compat") + os.sep)


class FrameRecord(TypedDict):
    """A frame of a stack, as torch writes it."""

    name: str
    filename: str
    line: int


#: Frames, innermost first.
Stack = list[FrameRecord]


def capture_function(stacks: str | None) -> Callable[[], Any] | None:
    """Return a function that captures the stack: ``"python"`` frames, ``"all"`` with C++ ones, None: no stacks."""
    if stacks is None:
        return None
    gather, cpp = GATHER_STACK.get(), stacks == "all"
    return lambda: gather(python=True, script=False, cpp=cpp)


def stack_lines(frames: Stack) -> list[str]:
    """Return a line of text for each frame."""
    return [f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in frames]


@contextmanager
def compiler_not_imported() -> Iterator[None]:
    """Keep torch from importing its compiler on this thread.

    Torch asks it for the source of compiled code when it makes stacks readable. A program that has not imported it has
    no such code; importing it takes seconds and changes the environment, the warnings' filters and torch's functions.
    """
    original = LAZY_MODULES.find()
    if _COMPILER in sys.modules or not original:
        yield
        return
    own, patches = threading.get_ident(), Patches()

    def lazily(name: str) -> Any:
        if f"torch.{name}" == _COMPILER and threading.get_ident() == own:
            raise AttributeError(name)
        return original(name)

    patches.put(*LAZY_MODULES.place(), lazily)
    try:
        yield
    finally:
        patches.restore()


class StackWriter:
    """Turns captured stacks into lists of frame dicts as torch writes them, innermost frame first, equal ones into the
    same list, which a pickle stores once. Frames of memprof's own recording code and of ``hidden`` folders are left
    out."""

    def __init__(self, hidden: Sequence[str] = ()) -> None:
        self._hidden = (*_OURS, *hidden)
        self._stacks: dict[tuple[int, ...], Stack] = {}
        self._frames: dict[tuple[str, int, str], FrameRecord] = {}

    def write(self, captured: list[Any]) -> list[Stack]:
        """Return frames of each captured stack (``[]`` for None), in the order given."""
        symbolize = SYMBOLIZE.get()
        out: list[Stack] = [[] for _ in captured]
        places = [i for i, tb in enumerate(captured) if tb is not None]
        for start in range(0, len(places), _BATCH):
            batch = places[start : start + _BATCH]
            with compiler_not_imported():
                readable = symbolize([captured[i] for i in batch])
            # Dicts are shared inside one batch and kept alive, so ids name frames while it lasts.
            known: dict[int, FrameRecord | None] = {}
            same: dict[tuple[int, ...], Stack] = {}
            for i, frames in zip(batch, readable, strict=True):
                key = tuple(map(id, frames))
                stack = same.get(key)
                if stack is None:
                    stack = same[key] = self._intern(frames, known)
                out[i] = stack
        return out

    def _intern(self, frames: list[Any], known: dict[int, FrameRecord | None]) -> Stack:
        mine = []
        for frame in frames:
            key = id(frame)
            if key not in known:
                known[key] = self._frame(frame)
            if (shared := known[key]) is not None:
                mine.append(shared)
        return self._stacks.setdefault(tuple(map(id, mine)), mine)

    def _frame(self, frame: FrameRecord) -> FrameRecord | None:
        file, line, name = str(frame["filename"]), int(frame["line"]), str(frame["name"])
        if file.startswith(self._hidden):
            return None
        return self._frames.setdefault((file, line, name), {"name": name, "filename": file, "line": line})
