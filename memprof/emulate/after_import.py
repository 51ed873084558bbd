"""Call a function right after a module was imported, whoever imports it and whenever.

``startup/sitecustomize.py`` loads this file by its path, in a Python that may have no memprof: the standard library
only.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Hook = Callable[[ModuleType], None]


class _Finder(MetaPathFinder):
    """Lets the others find a module, and adds a step after its execution."""

    def __init__(self) -> None:
        self.hooks: dict[str, list[Hook]] = {}
        self._searching: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.hooks or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for hook in self.hooks.pop(fullname, []):
                hook(module)

        loader.exec_module = exec_module
        return spec


_finder = _Finder()


def when_imported(name: str, hook: Hook) -> None:
    """Call ``hook(module)`` as soon as the module of that name is there, once; now if it is already."""
    if (module := sys.modules.get(name)) is not None:
        hook(module)
        return
    _finder.hooks.setdefault(name, []).append(hook)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
