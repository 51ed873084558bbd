"""Read files that lie elsewhere: ``s3://``, ``gs://``, ``hf://``, ``https://`` and whatever else fsspec opens.

A :class:`RemotePath` stands where a :class:`~pathlib.Path` does in all that reads recordings. It answers as a path does
and reads a file piece by piece, without a copy on this disk. Each process opens it with its own credentials. A login or
a signature in the URL opens the file and is printed nowhere.
"""

from __future__ import annotations

import datetime
import errno
import io
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import quote, unquote

from memprof.errors import UsageError, how_to_install

if TYPE_CHECKING:
    _Base = Path
else:
    _Base = PurePosixPath

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(?:([^/@]*)@)?([^/?#]*)([^?]*)(\?.*)?", re.DOTALL)
_PIECE = 1 << 20
# The longest wait for a store's next answer, in seconds; one that was silent so long is not asked again for as long.
_SILENT_S = 60.0
_SILENT_SINCE: dict[tuple[str, ...], float] = {}
# A file whose size its server does not say is read into memory up to so many bytes.
_MOST_UNSIZED = 1 << 30
# The second part of a path inside an archive begins so; the archive's place follows, quoted.
_IN_ARCHIVE = "::"
_Out = TypeVar("_Out")
#: What the URLs given here had that is not printed: logins by scheme and host, queries by URL.
_LOGINS: dict[tuple[str, str], str] = {}
_QUERIES: dict[str, str] = {}
#: The last file whose server does not say its size, by URL, and when it was read.
_UNSIZED: dict[str, tuple[float, bytes]] = {}
_KEPT_S = 60
#: Called with the bytes read of an open file and its size, None if its server does not say it.
OnRead = Callable[[int, "int | None"], None]
_ON_READ: list[OnRead] = []
#: Where stores write a file's time; none has the same name.
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")


def place_of(given: str | os.PathLike[str]) -> Path:
    """Return the path that a text names: a :class:`RemotePath` for a URL.

    Raises:
        UsageError: a URL without host or bucket, or one that chains several.
    """
    if isinstance(given, RemotePath):
        return given
    inner, chained, archive = os.fspath(given).partition("::")
    if chained and (named := _URL.fullmatch(inner)) is not None and archive and "::" not in archive:
        scheme, _, host, path, _ = named.groups()
        return RemotePath(f"{scheme.lower()}:", _IN_ARCHIVE + quote(str(place_of(archive)), safe=""), host + path)
    found = _URL.fullmatch(os.fspath(given))
    if found is None:
        return Path(given)
    scheme, login, host, path, query = found.groups()
    scheme = scheme.lower()
    if scheme == "file" and not host:
        return Path(path)
    if "::" in os.fspath(given) or (not host and scheme != "memory"):
        raise UsageError(f"{scheme}://{host}{path}: no URL of one file or folder; write it like s3://bucket/run/file.")
    place = RemotePath(f"{scheme}:", host, path.lstrip("/"))
    if login is not None:
        _LOGINS[scheme, host] = login
    if query is not None:
        _QUERIES[str(place)] = query
    return place


@contextmanager
def reporting_reads(on_read: OnRead) -> Iterator[None]:
    """Call ``on_read`` for every piece of a remote file that this process reads meanwhile."""
    _ON_READ.append(on_read)
    try:
        yield
    finally:
        _ON_READ.remove(on_read)


def walk(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Do what :func:`os.walk` does, anywhere."""
    if isinstance(folder, RemotePath):
        return folder.walked()
    return ((Path(at), folders, files) for at, folders, files in os.walk(folder))


class RemotePath(_Base):
    """A path on another machine or in a store, made by :func:`place_of`; read-only.

    What cannot be reached or read raises :class:`OSError`, without credentials in its text; a missing package raises
    :class:`~memprof.errors.UsageError`.
    """

    def __str__(self) -> str:
        scheme, *rest = self.parts
        if (archive := self._archive()) is not None:
            return f"{scheme}//{'/'.join(rest[1:])}::{archive}"
        return f"{scheme}//{'/'.join(rest)}"

    def __reduce__(self) -> tuple[Any, ...]:
        return place_of, (self._url(),)

    # ---- what a path says --------------------------------------------------------------------------------------------

    def relative_to(self, *other: Any, **kwargs: Any) -> Any:
        """Return the rest of this path below ``other``, a :class:`~pathlib.Path`."""
        above = RemotePath(*other)
        if self.parts[: len(above.parts)] != above.parts:
            raise ValueError(f"{self} is not below {above}")
        return Path(*self.parts[len(above.parts) :])

    def resolve(self, strict: bool = False) -> RemotePath:
        """Return the path itself: a store has no links."""
        return self

    def is_symlink(self) -> bool:
        """Tell that a store has no links."""
        return False

    def exists(self, **kwargs: Any) -> bool:
        """Tell whether there is a file or a folder."""
        return self.is_file() or self.is_dir()

    def is_file(self, **kwargs: Any) -> bool:
        """Tell whether there is a file."""
        try:
            return stat.S_ISREG(self.stat().st_mode)
        except OSError:
            return False

    def is_dir(self, **kwargs: Any) -> bool:
        """Tell whether there is a folder."""
        if self._is_a_pages_file():
            return False
        try:
            system, path = self._opened()
            return bool(self._answer(lambda: system.isdir(path)))
        except Exception as error:
            if isinstance(error, UsageError):
                raise
            return False

    def _is_a_pages_file(self) -> bool:
        """Tell by its ending whether a name on a web server is a file: fsspec would fetch all of it to ask."""
        return self.parts[0] in ("http:", "https:") and bool(self.suffix)

    def stat(self, **kwargs: Any) -> os.stat_result:
        """Return kind, size and, where the store tells it, the time of the last change; 0 where it does not."""
        try:
            system, path = self._opened()
            info = self._answer(lambda: system.info(path))
        except Exception as error:
            self._fail(error)
        folder = info.get("type") == "directory"
        size = info.get("size")
        if size is None and not folder:
            size = len(self._unsized())
        changed = next((_seconds(info[key]) for key in _TIMES if info.get(key) is not None), 0.0)
        values = ((stat.S_IFDIR if folder else stat.S_IFREG) | 0o444, 0, 0, 1, 0, 0, size or 0, *[changed] * 3)
        return os.stat_result(values, {"st_mtime_ns": int(changed * 1e9), "st_mtime": changed})

    def _unsized(self) -> bytes:
        """Return a file whose size its server does not say, read whole: the last such file is kept for a minute."""
        found = self._read_before()
        if found is None:
            data = bytearray()
            with self._file() as file:
                while piece := file.read(_PIECE):
                    data += piece
                    if len(data) > _MOST_UNSIZED:
                        raise OSError(errno.EFBIG, "the server does not say how large it is, and it is over 1 GiB")
            found = bytes(data)
            _UNSIZED.clear()
            _UNSIZED[str(self)] = time.monotonic(), found
        return found

    def _read_before(self) -> bytes | None:
        read_at, data = _UNSIZED.get(str(self), (0.0, None))
        return data if data is not None and time.monotonic() - read_at < _KEPT_S else None

    # ---- what lies there ---------------------------------------------------------------------------------------------

    def iterdir(self) -> Any:
        """Yield what a folder holds."""
        return (self / name for name, _ in self._entries())

    def glob(self, pattern: Any, **kwargs: Any) -> Any:
        """Yield what a folder itself holds under names of this pattern; nothing where there is no folder."""
        try:
            entries = self._entries()
        except OSError:
            return iter(())
        return (self / name for name, _ in entries if fnmatchcase(name, str(pattern)))

    def walked(self) -> Iterator[tuple[Path, list[str], list[str]]]:
        """Do what :func:`os.walk` does from here."""
        try:
            entries = self._entries()
        except OSError:
            return
        folders = [name for name, folder in entries if folder]
        yield self, folders, [name for name, folder in entries if not folder]
        for name in folders:
            at = self / name
            assert isinstance(at, RemotePath)
            yield from at.walked()

    def _entries(self) -> list[tuple[str, bool]]:
        """List the names in a folder, and whether each is a folder."""
        try:
            system, path = self._opened()
            listed = self._answer(lambda: system.ls(path, detail=True))
        except Exception as error:
            self._fail(error)
        above = str(path).rstrip("/")
        found: dict[str, bool] = {}
        for entry in listed:
            folder, _, name = str(entry["name"]).rstrip("/").rpartition("/")
            # A web server's page links to other places too.
            if name and "?" not in name and folder.strip("/") == above.strip("/"):
                found[name] = entry.get("type") == "directory"
        return sorted(found.items())

    # ---- what is in it -----------------------------------------------------------------------------------------------

    def open(self, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open the file to read bytes."""
        if mode != "rb":
            raise OSError(errno.EROFS, "memprof only reads what lies elsewhere")
        data = self._read_before()
        return self._file() if data is None else io.BufferedReader(io.BytesIO(data))

    def _file(self) -> io.BufferedReader:
        try:
            system, path = self._opened()
            return io.BufferedReader(_Stream(self, self._answer(lambda: system.open(path, "rb")), system), _PIECE)
        except Exception as error:
            self._fail(error)

    def read_bytes(self) -> bytes:
        """Return all bytes."""
        with self.open("rb") as file:
            data: bytes = file.read()
        return data

    def read_text(self, encoding: str | None = None, errors: str | None = None, newline: str | None = None) -> str:
        """Return all text."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    # ---- fsspec ------------------------------------------------------------------------------------------------------

    def _archive(self) -> str | None:
        """Return the place of the archive that this path is in; None outside one."""
        second = (*self.parts, "")[1]
        return unquote(second.removeprefix(_IN_ARCHIVE)) if second.startswith(_IN_ARCHIVE) else None

    def _answer(self, ask: Callable[[], _Out]) -> _Out:
        """Return what a store answers.

        Raises:
            TimeoutError: it is silent.
        """
        store = self.parts[:2]
        if time.monotonic() - _SILENT_SINCE.get(store, -_SILENT_S) < _SILENT_S:
            raise TimeoutError(f"no answer in {_SILENT_S:g} s")
        future: Future[_Out] = Future()

        def run() -> None:
            try:
                future.set_result(ask())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True, name="memprof-remote").start()
        if not wait([future], _SILENT_S).done:
            _SILENT_SINCE[store] = time.monotonic()
            raise TimeoutError(f"no answer in {_SILENT_S:g} s")
        return future.result()

    def _url(self) -> str:
        scheme, host, *_ = (*self.parts, "")
        if (archive := self._archive()) is not None:
            place = place_of(archive)
            return str(self).replace(f"::{archive}", f"::{place._url() if isinstance(place, RemotePath) else archive}")
        clean = str(self)
        login = _LOGINS.get((scheme.rstrip(":"), host))
        opened = clean if login is None else clean.replace("://", f"://{login}@", 1)
        return opened + _QUERIES.get(clean, "")

    def _opened(self) -> tuple[Any, str]:
        """Return fsspec's file system, and the path in it."""
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise UsageError(f"{self}: to read there memprof needs fsspec: {how_to_install('remote')}.") from None
        try:
            found: tuple[Any, str] = self._answer(lambda: url_to_fs(self._url()))
        except (ImportError, ValueError) as error:  # the scheme's own package is missing, or nobody knows it
            raise UsageError(f"{self}: fsspec cannot open {self.parts[0]}// ({self._clean(error)}).") from None
        return found

    def _fail(self, error: Exception) -> NoReturn:
        """Raise a store's own error as the error of a file."""
        if isinstance(error, UsageError):
            raise error
        # Of every failure of a web server fsspec says that there is no file; the cause says what it was.
        while isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
            error = error.__cause__
        if isinstance(error, FileNotFoundError):
            raise FileNotFoundError(errno.ENOENT, "no such file") from None
        raise OSError(errno.EIO, self._clean(error)) from None

    def _clean(self, error: Exception) -> str:
        """Return an error's text without logins and queries of URLs, in one line."""
        text = re.sub(r"(://)[^/@\s]*@", r"\1", f"{type(error).__name__}: {error}")
        return " ".join(re.sub(r"\?[^\s'\")>]*", "", text).split())[:200].rstrip(".")


class _Stream(io.RawIOBase):
    """Read an open file of fsspec; whatever its store raises becomes an :class:`OSError`."""

    def __init__(self, place: RemotePath, file: Any, system: Any) -> None:
        self._place, self._file = place, file
        self._system = system  # an archive's closes the archive when it is collected
        self._n_read = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._place._answer(lambda: self._file.read(len(buffer)))
        except Exception as error:
            self._place._fail(error)
        buffer[: len(data)] = data
        self._n_read += len(data)
        for on_read in _ON_READ:
            on_read(self._n_read, getattr(self._file, "size", None))
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        try:
            return int(self._file.seek(offset, whence))
        except Exception as error:
            self._place._fail(error)

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        self._file.close()
        super().close()


def _seconds(time: Any) -> float:
    """Return a store's time in seconds since the epoch; 0 for a form that is not known."""
    try:
        if isinstance(time, str):
            time = datetime.datetime.fromisoformat(time.replace("Z", "+00:00"))
        return float(time.timestamp() if isinstance(time, datetime.datetime) else time)
    except (TypeError, ValueError):
        return 0.0
