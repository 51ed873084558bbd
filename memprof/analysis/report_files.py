"""Read memprof's own JSON files: reports and comparisons, held against their schema (``report.schema.json``)."""

from __future__ import annotations

import gzip
import json
import math
import reprlib
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

from memprof.errors import InputError
from memprof.files import refuse_special
from memprof.text import clean_text

# The definitions of the answers, by what their ``schema`` says.
_KINDS = {
    "memprof.report/1": "report",
    "memprof.explain/1": "explain",
    "memprof.compare/1": "compare",
    "memprof.plan/1": "plan",
    "memprof.serving/1": "serving",
}
_GZIP = b"\x1f\x8b"
_MARK = b'"memprof.'
# A report with every one of a million allocations listed stays below this.
_MAX_BYTES = 2**31
_PIECE = 2**24
_MAX_DEPTH = 50


def read_memprof_json(path: Path) -> dict[str, Any] | None:
    """Read memprof's JSON at ``path`` (gzip'd or not); return ``None`` where the file is something else.

    All JSON enters here and is checked against its schema. Of a schema that ``report.schema.json`` lacks only the name
    is checked: callers refuse it.

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
    named = data.get("schema") if isinstance(data, dict) else None
    if not isinstance(named, str) or not named.startswith("memprof."):
        return None
    if named in _KINDS:
        try:
            validate(data)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
    return cast("dict[str, Any]", data)


@cache
def schema() -> dict[str, Any]:
    """Return the JSON Schema of ``memprof.report/1``, ``explain/1``, ``compare/1``, ``plan/1``, ``serving/1``."""
    text = Path(__file__).with_name("report.schema.json").read_text(encoding="utf-8")
    return cast("dict[str, Any]", json.loads(text))


def validate(data: dict[str, Any]) -> None:
    """Hold ``data`` against the schema.

    Raises:
        InputError: it is not what the schema says; the message names the first place that differs.
    """
    kind = str(data.get("schema"))
    if kind not in _KINDS:
        raise InputError(f"not a report that memprof understands: schema {clean_text(kind, 40)!r} (at schema).")
    found = problem(_KINDS[kind], data)
    if found is not None:
        what, path = found
        where = clean_text("/".join(path), 300) or "the top level"
        raise InputError(f"not a report that memprof understands: {clean_text(what, 300)} (at {where}).")


def problem(definition: str, data: Any) -> tuple[str, list[str]] | None:
    """Hold data against one definition of the schema; return what is wrong and the names that lead there, or None."""
    return _problem(f"#/$defs/{definition}", data)


@cache
def _checks(wanted: str) -> Callable[[Any], Any]:
    """Compile a definition, or what its JSON says, into a function."""
    import fastjsonschema

    part = {"$ref": wanted} if wanted.startswith("#") else json.loads(wanted)
    # It knows draft 7, which equals 2020-12 for this schema: no keyword stands beside a "$ref".
    draft = {"$schema": "http://json-schema.org/draft-07/schema#", "$defs": schema()["$defs"], **part}
    return cast("Callable[[Any], Any]", fastjsonschema.compile(draft, use_default=False, use_formats=False))


def _problem(wanted: str, data: Any) -> tuple[str, list[str]] | None:
    """Return what is wrong and the names that lead there; the deepest, where a value may be of several kinds."""
    from fastjsonschema import JsonSchemaValueException

    try:
        _checks(wanted)(data)
    except JsonSchemaValueException as error:
        path = [str(part) for part in error.path[1:]]
        inner = [(what, [*path, *further]) for what, further in _inner_problems(error)]
        return max(inner, key=lambda problem: len(problem[1]), default=(_broken_rule(error), path))
    return None


def _broken_rule(error: Any) -> str:
    if error.rule == "required":
        return f"{next(name for name in error.rule_definition if name not in error.value)!r} is a required property"
    return f"{reprlib.repr(error.value)} {error.message.removeprefix(error.name).lstrip()}"


def _inner_problems(error: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield what is wrong with a value by each of the kinds it could be, or with the names in it."""
    if error.rule in ("anyOf", "oneOf"):
        kinds = [kind for kind in error.rule_definition if error.value is None or kind != {"type": "null"}]
        yield from filter(None, (_problem(json.dumps(kind), error.value) for kind in kinds))
    if error.rule == "propertyNames":
        yield from filter(None, (_problem(json.dumps(error.rule_definition), name) for name in error.value))


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


class _Fraction(float):
    """A number that was written with a point or an exponent: no integer, though JSON Schema takes 1.0 for one."""

    def is_integer(self) -> bool:
        return False


def _finite(digits: str) -> float:
    number = _Fraction(digits)
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
            # In pieces: one read of the limit would ask for the limit's memory, however small the file.
            text = b"".join((start, *islice(iter(partial(file.read, _PIECE), b""), _MAX_BYTES // _PIECE + 1)))
    except (gzip.BadGzipFile, EOFError, zlib.error):
        return None  # damaged; the reader of snapshots has the better sentence for that
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or type(error).__name__}).") from None
    if len(text) > _MAX_BYTES:
        raise InputError(f"{path}: more than {_MAX_BYTES >> 30} GiB of JSON; write it with fewer allocations listed.")
    return text
