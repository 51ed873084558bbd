"""Keep the module names that were published before the techniques had rooms of their own."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: Module of ``memprof.grpo`` -> where it stands now, below ``memprof.grpo``.
MOVED = {
    "checkpointing": "techniques.checkpointing",
    "fused_loss": "loss.chunked_loss",
    "loss.fused_loss": "loss.chunked_loss",
    "offload": "techniques.offload",
    "packing": "techniques.packing",
    "prefix": "techniques.prefix",
    "rounding": "techniques.rounding",
    "segment_attention": "techniques.segment_attention",
    "tiled_mlp": "techniques.tiled_mlp",
}
_PACKAGE = "memprof.grpo."


class _OldNames(MetaPathFinder, Loader):
    """Import a moved module by its old name: the same module, and a DeprecationWarning with the new name."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.removeprefix(_PACKAGE) in MOVED and name.startswith(_PACKAGE) else None

    def exec_module(self, module: ModuleType) -> None:
        new = _PACKAGE + MOVED[module.__name__.removeprefix(_PACKAGE)]
        warnings.warn(f"{module.__name__} is now {new}", DeprecationWarning, stacklevel=2)
        sys.modules[module.__name__] = importlib.import_module(new)  # what the import statement then binds


def keep_old_names() -> None:
    """Let the old module names be imported; they are looked for after all that is really there."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.append(_OldNames())
