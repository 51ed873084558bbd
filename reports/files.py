"""Write a file, complete or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from memprof.reports.document.text import plain

from memprof.errors import InputError

__all__ = ["write_text"]


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` through a temporary file beside it, then rename.

    Raises:
        InputError: the place cannot be written to.
    """
    if path.is_dir():
        raise InputError(f"{plain(path)} is a directory; give the name of a file to write.")
    temporary: str | None = None
    try:
        if path.exists() and not path.is_file():  # a pipe or a device: nothing to rename over
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
            return
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:40]}.", suffix=".part", dir=path.parent or ".")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as stream:
            stream.write(text)
        # mkstemp's files are private; a report is meant to be shared as any new file would be.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        reason = error.strerror or type(error).__name__
        raise InputError(f"cannot write {plain(path)}: {reason}; choose another place with -o or --json.") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
