"""Load the tab when TensorBoard starts: next to nothing, because an error here would end it for everyone."""

from __future__ import annotations

from typing import Any

try:
    from tensorboard.plugins.base_plugin import TBLoader
except Exception:  # TensorBoard is missing, or of a version with another layout
    TBLoader = object  # type: ignore[assignment, misc, unused-ignore]

__all__ = ["MemoryTabLoader"]


class MemoryTabLoader(TBLoader):  # type: ignore[misc, unused-ignore]
    """Load the tab, or leave it out."""

    def load(self, context: Any) -> Any:
        """Return the plugin, or None where it cannot be had."""
        try:
            from memprof.integrations.board.plugin import MemoryTab

            return MemoryTab(context)
        except Exception as error:
            from sys import stderr

            print(f"memprof: no Memory tab ({error!r}).", file=stderr)
            return None
