"""Be told when a module has been imported, whoever imports it and whenever."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from memprof.errors import MemprofError

__all__ = ["when_imported"]

Hook = Callable[[ModuleType], None]


class _Watcher(MetaPathFinder):
    """Finds nothing itself: it lets the others find the module and adds a step after its execution."""

    def __init__(self) -> None:
        self.hooks: dict[str, list[Hook]] = {}
        self._asking: set[str] = set()

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
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for hook in self.hooks.pop(fullname, []):
                _call(hook, module)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            return None  # a loader that takes no attributes: nobody's in practice
        return spec


def _call(hook: Hook, module: ModuleType) -> None:
    """Call a hook whose mistake must not make somebody's import fail."""
    try:
        hook(module)
    except MemprofError as error:
        print(f"memprof does not watch this script, which runs on: {error}", file=sys.stderr)
    except Exception as error:
        print(f"memprof could not attach to {module.__name__} ({error!r}); the script runs unwatched.", file=sys.stderr)


_watcher = _Watcher()


def when_imported(name: str, hook: Hook) -> None:
    """Call ``hook(module)`` as soon as the module of that name is there, once; now if it is already."""
    if (module := sys.modules.get(name)) is not None:
        _call(hook, module)
        return
    _watcher.hooks.setdefault(name, []).append(hook)
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)
