"""Choose the folder that a run writes to: one that no other run has written to."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from memprof.analysis.ranks.run_folders import unused_folder


def _process_began() -> float:
    """Return when this process began, in seconds since the epoch; where the system does not say, now."""
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        age = 0.0
    return time.time() - age


# With several ranks, what was written to a folder before this process began is of an earlier run. Another rank of this
# run may have written before this one has imported anything.
_BEGAN = _process_began()
# Folders that runs of this process have chosen, as absolute paths.
_claimed: set[Path] = set()


def claim_folder(folder: Path, alone: bool, agree: Callable[[str], str | None] = lambda own: own) -> Path:
    """Return ``folder`` for a run that begins, or the first of ``folder-2``, ``folder-3`` ... without another run.

    Args:
        folder: where the run would write.
        alone: whether the run is this process alone: then it has written nothing yet.
        agree: returns the folder that all ranks of the run use, given this rank's choice; None if they cannot agree.
            Ranks choose by the times of files, which a file system on another machine may set by another clock.
    """
    own = unused_folder(folder, math.inf if alone else _BEGAN, _claimed)
    agreed = agree(str(own))
    chosen = own if agreed is None else Path(agreed)
    _claimed.add(Path(os.path.abspath(chosen)))
    return chosen


def moved_sentence(folder: Path, chosen: Path) -> str:
    """Say that another run has ``folder`` and this one writes to ``chosen``; "" if the two are the same."""
    return "" if chosen == folder else f"memprof: {folder} contains an earlier run; this run is written to {chosen}."
