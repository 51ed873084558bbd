"""Write a snapshot so that torch's own viewers, and memprof, can read it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

from memprof.errors import InputError
from memprof.files import write_whole
from memprof.foreign import SnapshotFile

# The highest protocol that PyTorch's JavaScript viewer understands.
PROTOCOL = 4


def save_snapshot(raw: SnapshotFile, path: str | os.PathLike[str]) -> Path:
    """Write a snapshot dict (torch's layout, plus the ``"memprof"`` key) and return the path.

    The file appears whole or not at all (:func:`memprof.files.write_whole`). Missing folders are made.

    Raises:
        InputError: the folder or file cannot be written.
    """
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, lambda out: pickle.dump(raw, out, protocol=PROTOCOL))
    except OSError as error:
        raise InputError(f"{file}: cannot be written ({error.strerror or error}).") from None
    return file
