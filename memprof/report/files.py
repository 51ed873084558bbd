"""Read and write memprof's own JSON files: reports, explanations, comparisons and plans."""

from __future__ import annotations

import gzip
import zlib
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from memprof.errors import InputError
from memprof.files import refuse_special, write_text
from memprof.report.base import Model
from memprof.report.codec import parse, schema_name, to_json
from memprof.report.report import Report
from memprof.text import clean_text

_GZIP = b"\x1f\x8b"
_MARK = b'"memprof.'
# A report with every one of a million allocations listed stays below this.
_MAX_BYTES = 2**31
_PIECE = 2**24
_A = TypeVar("_A", bound=Model)


def read_answer(path: Path) -> Model | str | None:
    """Read memprof's JSON at ``path``, compressed with gzip or not.

    Returns:
        The answer, such as a :class:`memprof.report.Report`; the name of a schema of memprof's that has no model, such
        as that of a newer version; ``None`` if the file is something else.

    Raises:
        InputError: the file cannot be read, is an HTML page, is damaged, or is not what its schema says.
    """
    text = _text(path)
    if text is None or _MARK not in text:
        return None
    try:
        return parse(text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except ValueError as error:
        raise InputError(f"{path}: the JSON is incomplete or damaged ({error}); write it again.") from None


def read_report(path: Path) -> Report | None:
    """Read a report's JSON; ``None`` if the file is no answer of memprof's, such as a snapshot.

    Raises:
        InputError: as :func:`read_answer` raises, or the file is another answer.
    """
    return expected(read_answer(path), Report, path, "give a snapshot or a report")


def write_answer(answer: Model, path: Path) -> None:
    """Write an answer's JSON, complete or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    write_text(path, to_json(answer))


def expected(answer: Model | str | None, kind: type[_A], path: Path, instead: str) -> _A | None:
    """Return the answer if it is of one kind, or ``None`` for ``None``.

    Raises:
        InputError: it is another answer; the message ends with ``instead``.
    """
    if answer is None or isinstance(answer, kind):
        return answer
    raise InputError(f"{path}: {schema_of(answer)!r:.60} is no {schema_of(kind)}; {instead}.")


def schema_of(answer: Model | type[Model] | str) -> str:
    """Return the name of an answer's schema, such as ``memprof.report/1``."""
    if isinstance(answer, str):
        return clean_text(answer, 60)
    return schema_name(answer if isinstance(answer, type) else type(answer))


def _text(path: Path) -> bytes | None:
    """Return the whole file if it may be JSON; ``None`` if its first character shows that it is not."""
    try:
        refuse_special(path)
        with path.open("rb") as raw, gzip.open(raw) if raw.peek(2)[:2] == _GZIP else raw as file:
            start = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
            if start[:9].lower() in (b"<!doctype", b"<html"):
                raise InputError(f"{path}: an HTML page; give the snapshot or the JSON it was made from.")
            if not start.startswith(b"{"):
                return None
            # In pieces: one read of the limit would allocate the limit's memory, however small the file.
            text = b"".join((start, *islice(iter(partial(file.read, _PIECE), b""), _MAX_BYTES // _PIECE + 1)))
    except (gzip.BadGzipFile, EOFError, zlib.error):
        return None  # damaged; the reader of snapshots has the better sentence for that
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or type(error).__name__}).") from None
    if len(text) > _MAX_BYTES:
        raise InputError(f"{path}: more than {_MAX_BYTES >> 30} GiB of JSON; write it with fewer allocations listed.")
    return text
