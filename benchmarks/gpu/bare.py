"""A snapshot as somebody without memprof would have written it."""

from __future__ import annotations

import pickle
from pathlib import Path

__all__ = ["without_key"]


def without_key(snapshot: Path) -> Path:
    """A copy beside the file without the ``"memprof"`` key. Only for files this process's own run has just written."""
    data = pickle.loads(snapshot.read_bytes())
    data.pop("memprof", None)
    bare = snapshot.with_suffix(".bare.pickle")
    bare.write_bytes(pickle.dumps(data, protocol=4))
    return bare
