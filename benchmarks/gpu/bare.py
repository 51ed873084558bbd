"""Write a snapshot as somebody without memprof would have."""

from __future__ import annotations

from pathlib import Path

from memprof.snapshot.unpickle import read_plain
from memprof.snapshot.writer import save_snapshot


def without_key(snapshot: Path) -> Path:
    """Write a copy beside the file without the ``"memprof"`` key."""
    data = read_plain(snapshot)
    data.pop("memprof", None)
    return save_snapshot(data, snapshot.with_suffix(".bare.pickle"))
