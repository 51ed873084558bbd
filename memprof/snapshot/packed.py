"""Unpack files that are gzip, xz or zstd, a piece at a time and within bounds."""

from __future__ import annotations

import importlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from memprof.errors import InputError

# Snapshots compress 5 to 50 times; a file that grows by more than this was made to fill memory.
_MAX_INFLATION = 200
_FREE_INFLATION = 64 * 2**20
PIECE = 1 << 18  # bytes read or unpacked at a time


def is_packed(data: bytes) -> bool:
    """Tell whether a file with these first bytes is packed."""
    return any(data.startswith(magic) for magic, _, _ in _KINDS)


def pieces_of(data: bytes) -> Iterator[bytes]:
    """Yield a file's bytes piece by piece."""
    return (data[at : at + PIECE] for at in range(0, len(data), PIECE))


def unpacked(pieces: Iterable[bytes], size: int, name: str) -> Iterator[bytes]:
    """Yield a file's content: what its pieces unpack to, or the pieces themselves where they are not packed.

    Args:
        size: bytes of the whole file, which bound those it may unpack to.

    Raises:
        InputError: it is damaged, ends too early or unpacks to far more than a snapshot would.
    """
    rest = iter(pieces)
    first = next(rest, b"")
    for magic, kind, open_ in _KINDS:
        if first.startswith(magic):
            left = _FREE_INFLATION + _MAX_INFLATION * size
            for piece in _members(first, rest, magic, kind, open_, name):
                left -= len(piece)
                if left < 0:
                    raise InputError(
                        f"{name}: not read, because this {kind} unpacks to more than {_MAX_INFLATION} times itself."
                    )
                yield piece
            return
    yield first
    yield from rest


def _members(
    data: bytes, rest: Iterator[bytes], magic: bytes, kind: str, open_: Callable[[str], Any], name: str
) -> Iterator[bytes]:
    """Yield what one packed stream after another holds; what follows the last is not looked at."""
    try:
        while data.startswith(magic):
            member = open_(name)
            while not member.eof:
                if not data and member.needs_input:
                    data = next(rest, b"")
                ended = not data and member.needs_input
                piece, data = member.decompress(data, PIECE), b""
                if piece:
                    yield piece
                elif ended and not member.eof:
                    raise InputError(f"{name}: the {kind} data end too early; copy the file again.")
            data = member.unused_data
            while len(data) < len(magic) and (more := next(rest, b"")):
                data += more
    except InputError:
        raise
    except Exception as error:  # each library has an error of its own for damaged data
        if isinstance(error, MemoryError):
            raise
        raise InputError(f"{name}: damaged {kind} data; copy the file again.") from None


class _Gzip:
    """Unpack one gzip member with the interface of lzma's and zstd's decompressors."""

    def __init__(self, name: str) -> None:
        self._member = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._member.eof

    @property
    def needs_input(self) -> bool:
        return not self._member.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._member.unused_data

    def decompress(self, data: bytes, most: int) -> bytes:
        return self._member.decompress(self._member.unconsumed_tail + data, most)


def _xz(name: str) -> Any:
    import lzma

    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=1 << 30)


def _zstd(name: str) -> Any:
    for module in ("compression.zstd", "backports.zstd"):
        try:
            zstd = importlib.import_module(module)
            break
        except ImportError:
            continue
    else:
        raise InputError(
            f"{name}: zstd data, which Python reads from 3.14 on; unpack them or pip install backports.zstd."
        )
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 27})


_KINDS: tuple[tuple[bytes, str, Callable[[str], Any]], ...] = (
    (b"\x1f\x8b", "gzip", _Gzip),
    (b"\xfd7zXZ\0", "xz", _xz),
    (b"\x28\xb5\x2f\xfd", "zstd", _zstd),
)


def physical_memory() -> int:
    """Return the bytes of memory in this machine; a very large number where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 1 << 62
