"""Load the tab. TensorBoard imports this module when it starts, so an error here would end TensorBoard."""

from __future__ import annotations

from typing import Any

try:
    from tensorboard.plugins.base_plugin import TBLoader
except Exception:  # TensorBoard is missing, or of a version with another layout
    TBLoader = object  # type: ignore[assignment, misc, unused-ignore]


class MemoryTabLoader(TBLoader):  # type: ignore[misc, unused-ignore]
    """Load the tab, or leave it out."""

    def load(self, context: Any) -> Any:
        """Return the plugin; print the error and return None where it cannot be loaded."""
        try:
            from memprof.integrations.board.plugin import MemoryTab

            return MemoryTab(context)
        except Exception as error:
            from sys import stderr

            print(f"memprof: no Memory tab ({error!r}).", file=stderr)
            return None
