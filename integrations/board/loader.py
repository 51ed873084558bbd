"""Load the tab when TensorBoard starts: next to nothing, because an error here would end it for everyone."""

from __future__ import annotations

from typing import Any

try:
    from tensorboard.plugins.base_plugin import TBLoader
except Exception:  # another version's layout, or no TensorBoard at all
    TBLoader = object  # type: ignore[assignment, misc, unused-ignore]

__all__ = ["MemoryTabLoader"]


class MemoryTabLoader(TBLoader):  # type: ignore[misc, unused-ignore]
    """Loads the tab, or leaves it out."""

    def load(self, context: Any) -> Any:
        """Return the plugin, or None where it cannot be had."""
        try:
            from memprof.integrations.board.plugin import MemoryTab

            return MemoryTab(context)
        except Exception as error:
            from sys import stderr

            print(f"memprof: no Memory tab ({error!r}).", file=stderr)
            return None
