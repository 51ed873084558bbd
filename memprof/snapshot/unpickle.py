"""Reading an untrusted file into plain Python data, and nothing but plain data.

A memory snapshot needs no globals to be unpickled, so every one is refused by name.
"""

from __future__ import annotations

import gc
import io
import json
import pickle
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memprof.errors import InputError, UnsafePickle

__all__ = ["read_plain"]


class _PlainUnpickler(pickle.Unpickler):
    """Builds dicts, lists, tuples, strings and numbers; whatever else is asked for is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise UnsafePickle(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise UnsafePickle("a persistent id")


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Unpickling makes millions of containers and no garbage: the cycle collector only costs time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def read_plain(path: Path) -> Any:
    """The plain Python data in a pickle, gzip'd pickle or JSON file.

    Raises:
        UnsafePickle: the pickle names a global.
        InputError: anything else that keeps the file from being read, in one sentence.
    """
    data = _read_bytes(path)
    with _collector_paused():
        if data[:1] in (b"{", b"["):
            try:
                return json.loads(data)
            except (ValueError, RecursionError):
                pass
        try:
            return _PlainUnpickler(io.BytesIO(data)).load()
        except UnsafePickle as refused:
            raise UnsafePickle(
                f"{path}: refused, because this pickle wants to load {refused}; a memory snapshot never does. "
                "Do not open it with other tools."
            ) from None
        except MemoryError:
            raise InputError(f"{path}: reading it needs more memory than there is.") from None
        except EOFError:
            raise InputError(f"{path}: the pickle ends too early; copy the file again or record a new one.") from None
        except Exception as error:
            raise InputError(
                f"{path}: not a memory snapshot ({type(error).__name__} while unpickling); "
                "expected what torch.cuda.memory._dump_snapshot writes."
            ) from None


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file.") from None
    except IsADirectoryError:
        raise InputError(f"{path}: a folder, not a snapshot file; name the files in it.") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}).") from None
    if not data:
        raise InputError(f"{path}: the file is empty; the run may have died while writing it.")
    if data[:2] == b"\x1f\x8b":
        try:
            return zlib.decompress(data, wbits=31)
        except zlib.error:
            raise InputError(f"{path}: damaged gzip data; copy the file again.") from None
    return data
