"""Call a function after a module is imported, whoever imports it and whenever."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from memprof.recording.guard import FailureGuard, guarded, on_stderr

Hook = Callable[[ModuleType], None]


class _Watcher(MetaPathFinder):
    """Finds nothing itself: it lets the others find the module and adds a step after its execution."""

    def __init__(self) -> None:
        self.hooks: dict[str, list[Hook]] = {}
        self._asking: set[str] = set()
        self.guard = FailureGuard("script", "what it does from this import on", on_stderr)

    @guarded
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.hooks or fullname in self._asking:
            return None
        self._asking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking.discard(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is None or not hasattr(loader, "exec_module"):
            return None
        try:
            loader.exec_module = self.guard.around(loader.exec_module, lambda args, _: args[0], self._executed)
        except AttributeError:
            return None  # a loader that takes no attributes; none is known
        return spec

    def _executed(self, module: ModuleType, _: Any, error: BaseException | None) -> None:
        for hook in () if error is not None else self.hooks.pop(module.__name__, ()):
            _guard(module.__name__)(hook, module)


def _guard(name: str) -> FailureGuard:
    """Make the guard of an import hook: its failure must not make somebody's import fail."""
    return FailureGuard("script", f"what the script does with {name}", on_stderr)


_watcher = _Watcher()


def when_imported(name: str, hook: Hook) -> None:
    """Call ``hook(module)`` as soon as the module of that name is there, once; now if it is already."""
    if (module := sys.modules.get(name)) is not None:
        _guard(name)(hook, module)
        return
    _watcher.hooks.setdefault(name, []).append(hook)
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)
