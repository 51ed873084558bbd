"""Choose where one ``memprof run`` writes: never over what an earlier one wrote."""

from __future__ import annotations

import os
import time
from pathlib import Path

from memprof.analysis.ranks.run_folders import unused_folder


class RunFolder:
    """Remember when the run began, and number its folder where an earlier run has the one it would write to: every rank
    of a run chooses alike."""

    def __init__(self) -> None:
        self._began = time.time()

    def of(self, folder: Path) -> Path:
        """Return ``folder``, or the same with a number at its end."""
        return unused_folder(folder, self._began)

    def sentence(self, folder: Path) -> str:
        """Say that an earlier run has ``folder``, and where this one goes; on rank 0, and only where one has."""
        chosen = self.of(folder)
        if chosen == folder or os.environ.get("RANK", "0") != "0":
            return ""
        return f"memprof: {folder} holds an earlier run; this one is written to {chosen}."
