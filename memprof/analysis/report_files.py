"""Read memprof's own JSON files: reports and comparisons."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from pathlib import Path
from typing import Any

from memprof.errors import InputError, refuse_special

__all__ = ["read_memprof_json"]

_GZIP = b"\x1f\x8b"
_MARK = b'"memprof.'
# A report with every one of a million allocations listed stays below this.
_MAX_BYTES = 2**31
_MAX_DEPTH = 50


def read_memprof_json(path: Path) -> dict[str, Any] | None:
    """Read memprof's JSON at ``path`` (gzip'd or not); return ``None`` where the file is something else.

    Only the file's own ``schema`` field is looked at; validate the result against that schema before using it.

    Raises:
        InputError: the file cannot be read, is an HTML page, or is damaged JSON of memprof's.
    """
    text = _text(path)
    if text is None or _MARK not in text:
        return None
    try:
        data = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: the JSON ends early or is damaged ({type(error).__name__}); write it again."
        ) from None
    if _deeper(data, _MAX_DEPTH):
        raise InputError(f"{path}: the JSON is nested deeper than any report; write it again.")
    return data if isinstance(data, dict) and str(data.get("schema", "")).startswith("memprof.") else None


def _deeper(value: Any, levels: int) -> bool:
    """Tell whether lists and records are nested more than ``levels`` deep."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return False
    return levels == 0 or any(_deeper(item, levels - 1) for item in value)


def _whole(digits: str) -> int:
    """Parse an integer that a machine can count; larger ones would overflow where they are shown."""
    if len(digits) > 20:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("a number without end")
    return number


def _text(path: Path) -> bytes | None:
    """Return the whole file where it may be JSON; ``None`` where its first character shows that it is not."""
    try:
        refuse_special(path)
        with path.open("rb") as raw, gzip.open(raw) if raw.peek(2)[:2] == _GZIP else raw as file:
            start = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
            if start[:9].lower() in (b"<!doctype", b"<html"):
                raise InputError(f"{path}: an HTML page; give the snapshot or the JSON it was made from.")
            if not start.startswith(b"{"):
                return None
            text = start + file.read(_MAX_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        if _damaged(error):
            return None
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise InputError(f"{path}: cannot be read ({reason}).") from None
    if len(text) > _MAX_BYTES:
        raise InputError(f"{path}: more than {_MAX_BYTES >> 30} GiB of JSON; write it with fewer allocations listed.")
    return text


def _damaged(error: Exception) -> bool:
    """Tell whether a gzip'd file is damaged; the reader of snapshots has the better sentence for that."""
    return isinstance(error, (gzip.BadGzipFile, EOFError, zlib.error))
