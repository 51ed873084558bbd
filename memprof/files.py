"""Write files whole or not at all, and wait for nothing that only looks like a file."""

from __future__ import annotations

import os
import stat
import sys
import time
import tokenize
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from memprof.errors import InputError

# Every unfinished file begins so; a killed writer's is deleted by a later write into the folder.
_UNFINISHED = ".memprof-"
_ABANDONED_AFTER_S = 3600
_DEVICES = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))


def cache_is_off() -> bool:
    """Tell whether the user wants nothing kept from one command to the next (``MEMPROF_CACHE=0``)."""
    return os.environ.get("MEMPROF_CACHE") == "0"


def cache_folder() -> Path:
    """Return the folder of what is kept from one command to the next, unless ``MEMPROF_CACHE`` names another.

    Raises:
        RuntimeError: the user has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "memprof"


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        ValueError: it is none.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    return table


def read_source(path: str | Path, longest: int) -> str | None:
    """Return up to ``longest`` characters of a Python file, in the encoding it declares; None if it cannot be read."""
    try:
        with tokenize.open(path) as file:
            return file.read(longest)
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
        return None


def is_newer(path: str | Path, moment: float) -> bool:
    """Return whether a file changed after a moment, in seconds since 1970; a file that is gone did not."""
    try:
        return os.stat(path).st_mtime > moment
    except OSError:
        return False


def refuse_special(path: Path) -> None:
    """Refuse a pipe, a socket or a device in place of a file: reading one may wait without end.

    Raises:
        InputError: it is one.
        OSError: there is nothing at ``path``.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise InputError(f"{path}: not a regular file; save its contents to a file first.")


def refuse_unwritable(path: Path) -> None:
    """Refuse a place where :func:`write_text` would fail, before long work for what is to be written there.

    Raises:
        InputError: it is a directory, or lies in none that can be written to.
    """
    if path.is_dir():
        raise InputError(f"{path} is a directory; give the name of a file to write.")
    folder = path.parent
    if not folder.is_dir():
        raise _unwritable(path, "there is no such folder" if not folder.exists() else f"{folder} is no folder")
    if not os.access(path if _is_special(path) else folder, os.W_OK):
        raise _unwritable(path, "permission denied")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to a file that somebody named, as :func:`write_whole` does.

    Raises:
        InputError: the place cannot be written to.
    """
    if path.is_dir():
        raise InputError(f"{path} is a directory; give the name of a file to write.")
    try:
        write_whole(path, text)
    except OSError as error:
        raise _unwritable(path, error.strerror or type(error).__name__) from None


def write_whole(path: Path, data: str | bytes | Callable[[IO[bytes]], None]) -> None:
    """Write a file under another name beside ``path``, then rename it: readers see the old file or the new one.

    A link at ``path`` is replaced, not followed. A pipe or a device is written to, if somebody reads it.

    Args:
        path: in a folder that exists.
        data: text (written as UTF-8), bytes, or what writes them to an open file.

    Raises:
        OSError: the file cannot be written. What stood at ``path`` stands there still.
    """
    if _is_special(path):
        with os.fdopen(_opened_for_reader(path), "wb") as file:
            _fill(file, data)
        return
    _clear_abandoned(path.parent)
    unfinished = path.with_name(f"{_UNFINISHED}{os.urandom(8).hex()}.part")
    # The system applies the user's umask; a name that somebody else has taken is refused, links included.
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            _fill(file, data)
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


def _fill(file: IO[bytes], data: str | bytes | Callable[[IO[bytes]], None]) -> None:
    if callable(data):
        data(file)
    else:
        file.write(data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data)


def _is_special(path: Path) -> bool:
    """Tell whether ``path`` is no file to rename over: a pipe, a device, or /dev/stdout wherever that leads."""
    if path.absolute().parent in _DEVICES:
        return path.exists()
    return path.exists() and not path.is_file() and not path.is_dir()


def _opened_for_reader(path: Path) -> int:
    """Open a pipe or a device without waiting for somebody to read it; ENXIO where nobody does."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_NONBLOCK", 0))
    os.set_blocking(handle, True)
    return handle


def _clear_abandoned(folder: Path) -> None:
    """Delete what writers that were killed left in a folder; another's that still writes is younger."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(_UNFINISHED) and entry.name.endswith(".part"):
                with suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_AFTER_S:
                        os.unlink(entry.path)


def _unwritable(path: Path, reason: str) -> InputError:
    return InputError(f"cannot write {path}: {reason}; choose another place with -o or --json.")
