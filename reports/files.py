"""Write a file, complete or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from memprof.reports.document.text import plain

from memprof.errors import InputError

__all__ = ["refuse_unwritable", "write_text"]


def refuse_unwritable(path: Path) -> None:
    """Refuse a place where :func:`write_text` would fail, before long work for what is to be written there.

    Raises:
        InputError: it is a directory, or lies in none that can be written to.
    """
    if path.is_dir():
        raise InputError(f"{plain(path)} is a directory; give the name of a file to write.")
    folder = path.parent
    if not folder.is_dir():
        raise _unwritable(path, "there is no such folder" if not folder.exists() else f"{plain(folder)} is no folder")
    special = path.exists() and not path.is_file()
    if not os.access(path if special else folder, os.W_OK):
        raise _unwritable(path, "permission denied")


def _unwritable(path: Path, reason: str) -> InputError:
    return InputError(f"cannot write {plain(path)}: {reason}; choose another place with -o or --json.")


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
        raise _unwritable(path, error.strerror or type(error).__name__) from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
