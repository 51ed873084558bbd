"""Write a snapshot so that torch's own viewers, and memprof, can read it."""

from __future__ import annotations

import os
import pickle
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from memprof.errors import InputError

__all__ = ["PROTOCOL", "save_snapshot"]

# The highest protocol that PyTorch's JavaScript viewer understands.
PROTOCOL = 4


def save_snapshot(raw: dict[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write a snapshot dict (torch's layout, plus the ``"memprof"`` key) and return the path.

    The file appears whole or not at all: it is written under a temporary name in the same folder
    and then renamed. Missing folders are made.

    Raises:
        InputError: the folder or file cannot be written.
    """
    file = Path(path)
    temporary: str | None = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{file.name}.", suffix=".part", dir=file.parent)
        with os.fdopen(handle, "wb") as out:
            pickle.dump(raw, out, protocol=PROTOCOL)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, file)
        temporary = None
    except OSError as error:
        raise InputError(f"{file}: cannot be written ({error.strerror or error}).") from None
    finally:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
    return file


def _umask() -> int:
    # The umask can be read only by setting it; the moment in between is harmless here.
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
