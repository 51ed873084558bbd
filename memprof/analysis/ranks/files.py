"""Find the recordings of a run's ranks in a folder, and choose those that belong together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from memprof.errors import InputError, UsageError

__all__ = ["Recording", "choose", "find_recordings", "recording_of"]

# File names of the callback, and common names of other tools (rank0_memory.pickle, mem_rank_3.pickle).
_OURS = re.compile(r"step-(\d{1,12})\.rank-(\d{1,6})\.(pickle|json)")
_THEIRS = re.compile(r"(?:^|[^a-z])rank[-_ .]?(\d{1,6})(?!\d)", re.IGNORECASE)
_SUFFIXES = (".pickle", ".pkl", ".json", ".pickle.gz", ".pkl.gz", ".json.gz")


@dataclass(frozen=True)
class Recording:
    """Hold one recording of one rank: a snapshot, its report's JSON, or both. A ``rank`` of None is in the file."""

    rank: int | None
    step: int | None
    snapshot: Path | None
    report: Path | None

    @property
    def path(self) -> Path:
        """Return the snapshot, or the report where there is no snapshot."""
        path = self.snapshot or self.report
        assert path is not None, "a recording is made of at least one file"
        return path


def find_recordings(place: Path) -> list[Recording]:
    """Find the recordings in ``place``, or in ``_memprof`` below it.

    Raises:
        InputError: the folder does not exist or cannot be read, or holds no rank's recording.
    """
    for folder in (place, place / "_memprof"):
        try:
            files = [path for path in folder.iterdir() if path.is_file() and not path.is_symlink()]
        except OSError as error:
            if folder == place:
                raise InputError(f"{place}: cannot be read ({error.strerror or error}).") from None
            continue
        if found := recordings_of(files):
            return found
    raise InputError(
        f"{place}: no recordings there or in its _memprof; give the output_dir of a run with the callback, or a folder "
        "of snapshots with rank0, rank1, ... in their names."
    )


def recordings_of(files: Iterable[Path]) -> list[Recording]:
    """Return the recordings among ``files`` by step and rank; a snapshot and its report are one recording."""
    ours: dict[tuple[int, int], dict[str, Path]] = {}
    theirs: list[Recording] = []
    for path in sorted(files):
        if match := _OURS.fullmatch(path.name):
            ours.setdefault((int(match.group(1)), int(match.group(2))), {})[match.group(3)] = path
        elif path.name.endswith(_SUFFIXES) and (other := _THEIRS.search(path.name)):
            theirs.append(Recording(int(other.group(1)), None, path, None))
    found = [Recording(rank, step, kinds.get("pickle"), kinds.get("json")) for (step, rank), kinds in ours.items()]
    return sorted(found, key=lambda r: (r.step or 0, r.rank or 0)) or theirs


def recording_of(path: Path) -> Recording:
    """Return the recording of one file named on the command line."""
    if match := _OURS.fullmatch(path.name):
        json = path if match.group(3) == "json" else None
        return Recording(int(match.group(2)), int(match.group(1)), None if json else path, json)
    other = _THEIRS.search(path.name)
    return Recording(int(other.group(1)) if other else None, None, path, None)


def choose(recordings: Iterable[Recording], step: int | None = None) -> list[Recording]:
    """Choose one recording of each rank, all of the newest step that most ranks recorded (or of ``step``).

    A rank without a recording of that step is left out, because figures of different steps cannot be compared.

    Raises:
        UsageError: there is no recording of the requested step.
    """
    by_step: dict[int | None, dict[int | None, Recording]] = {}
    for recording in recordings:
        by_step.setdefault(recording.step, {}).setdefault(recording.rank, recording)
    if step is not None:
        if step not in by_step:
            known = ", ".join(str(s) for s in sorted(s for s in by_step if s is not None)) or "no known number"
            raise UsageError(f"--step {step}: not recorded; there are recordings of step {known}.")
        return list(by_step[step].values())
    newest = max(by_step, key=lambda s: (len(by_step[s]), -1 if s is None else s))
    return list(by_step[newest].values())
