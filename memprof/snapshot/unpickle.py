"""Read an untrusted file into plain Python data, and nothing but plain data.

A memory snapshot needs no globals, so every global is refused by name. :mod:`memprof.snapshot.opcodes` keeps
out the other ways in which a pickle could harm its reader.
"""

from __future__ import annotations

import io
import json
import pickle
import stat
from pathlib import Path
from typing import Any

from memprof.errors import InputError, UnsafePickle
from memprof.snapshot.columns import collector_paused
from memprof.snapshot.containers import contained
from memprof.snapshot.opcodes import check_opcodes, without_frames
from memprof.snapshot.packed import is_packed, physical_memory, pieces_of, unpacked
from memprof.snapshot.shared_stacks import share_stacks
from memprof.units import format_bytes

# Bytes of memory per byte of file while a snapshot is read; a hostile file can reach five times as many.
_BYTES_PER_BYTE = 6


# How a pickle begins, and how many may follow one another in a file.
_PICKLE, _MOST_PICKLES = b"\x80", 100


class _PlainUnpickler(pickle.Unpickler):
    """Unpickle plain data and refuse every global, as a second lock behind the opcode check."""

    def find_class(self, module: str, name: str) -> Any:
        raise UnsafePickle(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise UnsafePickle("a persistent id")


def read_plain(path: Path) -> Any:
    """Return the plain Python data in a pickle or JSON file, packed with gzip, xz or zstd or not.

    Of several pickles that follow one another the result is a list.

    Raises:
        UnsafePickle: the pickle names a global.
        InputError: the file cannot be read; the message is one sentence.
    """
    return plain_from_bytes(_read_bytes(path), str(path))


def read_shared(path: Path) -> tuple[Any, list[Any]]:
    """Do :func:`read_plain`, with each distinct list of frames once.

    Returns the data, in which ``"frames"`` may be a position, and the lists at these positions.
    """
    shared = shared_from_bytes(_read_bytes(path), str(path))
    # What cannot be shared is read again as it is; held until now, its bytes would stand beside all the objects.
    return (read_plain(path), []) if shared is None else shared


def shared_from_bytes(data: bytes, name: str) -> tuple[Any, list[Any]] | None:
    """Do :func:`read_shared` on a file's bytes; None where :func:`plain_from_bytes` has to read it."""
    try:
        with collector_paused():
            found = share_stacks(without_frames(_whole(data, name), name))
            del data
            if found is None:
                return None
            written, count = found
            check_opcodes(written, name)
            both = _PlainUnpickler(io.BufferedReader(io.BytesIO(written), 1 << 16)).load()
    except Exception:  # anything, for damaged data: reading it as it is tells what is wrong
        return None
    if type(both) is not tuple or len(both) != 2 or type(both[1]) is not list or len(both[1]) != count:
        return None
    return both


def plain_from_bytes(data: bytes, name: str) -> Any:
    """Do :func:`read_plain` on a file's bytes; error messages call the file ``name``."""
    data = _whole(data, name)
    with collector_paused():
        try:
            data = without_frames(data, name)
            return _parse(data, name)
        except InputError:
            raise
        except MemoryError:
            raise InputError(f"{name}: reading it needs more memory than this machine has.") from None
        except Exception as error:  # the unpickler may raise anything for damaged data
            raise InputError(
                f"{name}: not a memory snapshot, or damaged ({type(error).__name__} while reading); "
                "expected what torch.cuda.memory._dump_snapshot writes."
            ) from None


def _whole(data: bytes, name: str) -> bytes:
    """Return a file's bytes, unpacked where they are packed.

    Raises:
        InputError: there are none, or more than this machine can read.
    """
    if not data:
        raise InputError(f"{name}: the file is empty; the run may have died while writing it.")
    if is_packed(data):
        data = b"".join(unpacked(pieces_of(data), len(data), name))
    data = contained(data, name)
    needed, total = _BYTES_PER_BYTE * len(data), physical_memory()
    if needed > total:
        raise InputError(
            f"{name}: reading it would take about {format_bytes(needed)} of memory and this machine has "
            f"{format_bytes(total)}; read it on a larger one, or record with a smaller max_entries."
        )
    return data


def _parse(data: bytes, name: str) -> Any:
    if data[:64].lstrip()[:1] in (b"{", b"["):
        if data.count(b"{") + data.count(b"[") > len(data) // 8 + 4096:
            raise InputError(f"{name}: not a memory snapshot (little but empty containers in it).")
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            reason = "nested too deep" if isinstance(error, RecursionError) else str(error)[:80]
            raise InputError(f"{name}: damaged JSON ({reason}); copy the file again.") from None
    found = []
    while True:
        end = check_opcodes(data, name)
        try:
            # Without frames the unpickler asks for a few bytes at a time, so it needs a buffered reader.
            found.append(_PlainUnpickler(io.BufferedReader(io.BytesIO(data), 1 << 16)).load())
        except EOFError:
            raise InputError(f"{name}: the pickle ends too early; copy the file again or record a new one.") from None
        if data[end : end + 1] != _PICKLE:  # what else may follow is not read
            return found[0] if len(found) == 1 else found
        if len(found) == _MOST_PICKLES:
            raise InputError(f"{name}: not read, because more than {_MOST_PICKLES} pickles follow one another in it.")
        data = without_frames(data[end:], name)


def _read_bytes(path: Path) -> bytes:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise InputError(f"{path}: a folder, not a snapshot file; name the files in it.")
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path}: not a regular file; write the snapshot to one first.")
        size, total = status.st_size, physical_memory()
        if size > total // _BYTES_PER_BYTE:
            raise InputError(
                f"{path}: {format_bytes(size)} are too much to read with {format_bytes(total)} of memory; "
                "read it on a larger machine, or record with a smaller max_entries."
            )
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file.") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}).") from None
    except ValueError as error:  # a null byte in the name
        raise InputError(f"{str(path)!r}: not a file name ({error}).") from None
