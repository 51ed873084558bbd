"""Find the recordings below a log directory, by run, step and rank.

Requests name a run, a step and a rank, and the file is looked up among the recordings found here. No part of a request
becomes part of a path.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

_NAME = re.compile(r"step-(\d{1,12})\.rank-(\d{1,6})\.(pickle|json)")
# Log directories can be huge, so the search is bounded.
_MAX_FOLDERS = 20_000
_MAX_DEPTH = 8
_FRESH_SECONDS = 2.0


@dataclass(frozen=True)
class BoardRecording:
    """Hold one recording: its snapshot and, once it has been analysed, its report's JSON."""

    run: str
    step: int
    rank: int
    pickle: Path
    json: Path | None

    @property
    def changed(self) -> float:
        """Return when its snapshot was written (Unix seconds); 0 where it is gone."""
        try:
            return self.pickle.stat().st_mtime
        except OSError:
            return 0.0


class Recordings:
    """Find the recordings in log directories, and search again when the last search is old.

    Args:
        places: pairs of (prefix of the runs' names, folder).
    """

    def __init__(self, places: list[tuple[str, Path]]) -> None:
        self._places = places
        self._lock = Lock()
        self._found: dict[tuple[str, int, int], BoardRecording] = {}
        self._believed_until = float("-inf")

    def all(self) -> list[BoardRecording]:
        """Return every recording, by run, step and rank."""
        with self._lock:
            begun = time.monotonic()
            if begun > self._believed_until:
                self._found = {}
                for prefix, place in self._places:
                    self._look(prefix, place)
                # A slow disk is searched less often.
                now = time.monotonic()
                self._believed_until = now + max(_FRESH_SECONDS, 10 * (now - begun))
            return [self._found[key] for key in sorted(self._found)]

    def get(self, run: str, step: int, rank: int) -> BoardRecording | None:
        """Return one recording; None where it does not exist."""
        self.all()
        return self._found.get((run, step, rank))

    def _look(self, prefix: str, place: Path) -> None:
        root = place.resolve()
        for count, (folder, below, names) in enumerate(os.walk(root, followlinks=False)):
            inside = Path(folder).relative_to(root)
            if count >= _MAX_FOLDERS or len(inside.parts) >= _MAX_DEPTH:
                below.clear()
            below[:] = sorted(n for n in below if not n.startswith(".") and not n.startswith("checkpoint-"))
            ours = [(m, Path(folder, n)) for n in sorted(names) if (m := _NAME.fullmatch(n))]
            # Symbolic links are refused: they may lead anywhere, and memprof writes none.
            ours = [(m, p) for m, p in ours if p.is_file() and not p.is_symlink()]
            if ours:
                self._add(_run_name(prefix, root, inside), ours)

    def _add(self, run: str, files: list[tuple[re.Match[str], Path]]) -> None:
        by_key: dict[tuple[int, int], dict[str, Path]] = {}
        for match, path in files:
            by_key.setdefault((int(match.group(1)), int(match.group(2))), {})[match.group(3)] = path
        for (step, rank), kinds in by_key.items():
            if "pickle" in kinds:
                self._found[run, step, rank] = BoardRecording(run, step, rank, kinds["pickle"], kinds.get("json"))


def _run_name(prefix: str, root: Path, inside: Path) -> str:
    """Return a run's name as TensorBoard does: the folder around the run's own, relative to the log directory."""
    parts = inside.parts[:-1] if inside.name == "_memprof" else inside.parts
    name = "/".join((*((prefix,) if prefix else ()), *parts))
    return name or root.name or "."
