"""Track which module's forward is running on each thread, by global forward hooks that exist only while recording."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from memprof.compat.torch import AFTER_FORWARD, BEFORE_FORWARD, IS_COMPILING
from memprof.recording.guard import NULL_GUARD, FailureGuard

if TYPE_CHECKING:
    from torch import nn


class Running(NamedTuple):
    """Describe a module whose forward runs: its key, qualified name, and its model's role."""

    key: int
    name: str
    role: str | None


class _Threads(threading.local):
    def __init__(self) -> None:
        self.stack: list[Running] = []


class ModuleScope:
    """Keep the stack of running modules.

    Forward hooks are registered with ``always_call``, so an exception inside a forward (checkpointing stops its
    recomputation with one) takes its module off the stack too; what slips through all the same (an interrupt)
    is removed when an enclosing module ends.
    """

    def __init__(self) -> None:
        self._threads = _Threads()
        self._names: dict[int, tuple[str, str | None]] = {}
        self._handles: list[Any] = []

    def add_root(self, root: nn.Module, role: str | None) -> None:
        """Register the names of a model's modules; a module that two models share keeps its first role."""
        for name, module in root.named_modules():
            self._names.setdefault(id(module), (name or type(module).__name__, role))

    def start(self, guard: FailureGuard = NULL_GUARD) -> None:
        """Hook into every module's forward, except what torch.compile makes of it, which runs without hooks."""
        enter, leave = (guard.hook(step, IS_COMPILING.get()) for step in (self._enter, self._leave))
        self._handles = [BEFORE_FORWARD.get()(enter), AFTER_FORWARD.get()(leave, always_call=True)]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._threads = _Threads()

    @property
    def innermost(self) -> Running | None:
        """Return the innermost module whose forward runs on this thread."""
        stack = self._threads.stack
        return stack[-1] if stack else None

    def enter(self, module: nn.Module) -> None:
        """Enter a module whose forward began just before the hooks were installed."""
        self._enter(module, None)

    def clear(self) -> None:
        """Forget what this thread's stack holds: nothing runs at a phase's outermost end."""
        self._threads.stack.clear()

    def _enter(self, module: nn.Module, _args: Any) -> None:
        key = id(module)
        stack = self._threads.stack
        known = self._names.get(key)
        if known is None:
            outer = stack[-1] if stack else None
            known = (type(module).__name__, outer.role if outer else None)
        stack.append(Running(key, *known))

    def _leave(self, module: nn.Module, _args: Any, _output: Any) -> None:
        key = id(module)
        stack = self._threads.stack
        for i in range(len(stack) - 1, -1, -1):
            if stack[i].key == key:
                del stack[i:]
                return
