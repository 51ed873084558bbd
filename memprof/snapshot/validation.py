"""Read what a snapshot file says next to its events into classes, and name in notes what is not as documented."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from memprof.snapshot.recorded_run import Annotation, RecordedRun, RecordPart
from memprof.text import clean_text

#: A value of the allocator's settings; ``roundup_power2_divisions`` is a table.
Setting = str | int | float | bool | dict[str, int] | None

_MAX_DEPTH = 16
_MAX_VALUES = 20_000_000
_INT64 = 1 << 63
_P = TypeVar("_P", bound=RecordPart)


def read_run(raw: object, notes: list[str]) -> RecordedRun:
    """Return the ``"memprof"`` key of a snapshot; ``notes`` name what was dropped."""
    if raw is None:
        return RecordedRun()
    if not isinstance(raw, dict):
        notes.append("the memprof key is not a dict and was ignored")
        return RecordedRun()
    reader = _Reader("memprof key: ", notes)
    known = {field.encode_name for field in msgspec.structs.fields(RecordedRun)}
    plain = {}
    for key, value in raw.items():
        if not isinstance(key, str):
            notes.append("memprof key: a name in it is not text, ignored")
        elif key in known and value is not None:
            part = clean(value)
            if part is None:
                reader.drop(key, "is not plain data, or is nested too deep")
            else:
                plain[key] = _narrow(part) if key in ("config", "setup") else part
    if isinstance(holders := plain.get("holders"), list):  # names follow the time, as many as there are
        plain["holders"] = [[*row[:2], row[2:]] if isinstance(row, list) else row for row in holders]
    return reader.part(RecordedRun, plain) or RecordedRun()


def read_annotations(raw: object, notes: list[str]) -> list[Annotation]:
    """Return the annotations of a snapshot; ``notes`` say how many are not what PyTorch writes."""
    plain = clean(raw) if raw is not None else []
    if not isinstance(plain, list):
        notes.append("external_annotations are not a list of plain data, ignored")
        return []
    reader = _Reader("", notes)
    return list(reader.read(tuple[Annotation, ...], plain, "external_annotations", ()))


def read_settings(raw: object, notes: list[str]) -> dict[str, Setting]:
    """Return the allocator's settings as in the file; ``notes`` name those that are not a number, text or a flag."""
    plain = clean(raw) if raw is not None else {}
    if not isinstance(plain, dict):
        notes.append("allocator_settings are not a record of plain data, ignored")
        return {}
    reader = _Reader("", notes)
    return dict(reader.read(Mapping[str, Setting], _narrow(plain), "allocator_settings", {}))


class _Reader:
    """Convert plain data to classes, as much of it as possible.

    Args:
        prefix: the beginning of each note.
        notes: get one note for each field that is dropped, and for each list that entries are dropped from.
    """

    def __init__(self, prefix: str, notes: list[str]) -> None:
        self._prefix, self._notes = prefix, notes

    def drop(self, name: str, reason: str) -> None:
        """Note that a field is not used."""
        self._notes.append(f"{self._prefix}{name!r} {reason}, ignored")

    def read(self, kind: Any, plain: Any, name: str, default: Any) -> Any:
        """Return ``plain`` as ``kind``: all of it, else the parts that are as declared, else ``default``."""
        try:
            return msgspec.convert(plain, kind)
        except (msgspec.ValidationError, RecursionError) as error:
            reason = str(error)
        kind = _without_none(kind)
        origin = get_origin(kind)
        if isinstance(kind, type) and issubclass(kind, RecordPart) and isinstance(plain, dict):
            part = self.part(kind, plain, name)
            return default if part is None else part
        if origin is tuple and isinstance(plain, list):
            return tuple(self._entries(name, ((get_args(kind)[0], entry) for entry in plain)))
        if origin is not None and issubclass(origin, Mapping) and isinstance(plain, dict):
            pair: Any = tuple.__class_getitem__(get_args(kind))
            return dict(self._entries(name, ((pair, item) for item in plain.items())))
        self.drop(name, f"is not as documented ({_shortened(reason)})")
        return default

    def part(self, kind: type[_P], plain: Mapping[str, Any], name: str = "") -> _P | None:
        """Return a record without the fields that are not as declared; ``None`` if a required field is missing."""
        try:
            return msgspec.convert(plain, kind)
        except (msgspec.ValidationError, RecursionError):
            pass
        found: dict[str, Any] = {}
        hints = _hints(kind)
        for field in msgspec.structs.fields(kind):
            inner = f"{name}.{field.name}" if name else field.name
            if field.encode_name in plain:
                value = self.read(hints[field.name], plain[field.encode_name], inner, msgspec.NODEFAULT)
                if value is not msgspec.NODEFAULT:
                    found[field.name] = value
            if field.required and field.name not in found:
                self.drop(name, f"has no usable {field.name!r}")
                return None
        return kind(**found)

    def _entries(self, name: str, pairs: Iterator[tuple[Any, Any]]) -> Iterator[Any]:
        dropped = 0
        for kind, entry in pairs:
            try:
                yield msgspec.convert(entry, kind)
            except (msgspec.ValidationError, RecursionError):
                dropped += 1
        if dropped:
            entries = "1 entry" if dropped == 1 else f"{dropped} entries"
            verb = "is" if dropped == 1 else "are"
            self._notes.append(f"{self._prefix}{entries} of {name!r} {verb} not as documented, ignored")


@cache
def _hints(kind: type[RecordPart]) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _without_none(kind: Any) -> Any:
    """Return the one type beside ``None`` and ``UNSET`` in an optional type; other types as they are."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind
    left = [inner for inner in get_args(kind) if inner not in (type(None), msgspec.UnsetType)]
    return left[0] if len(left) == 1 else kind


def _shortened(reason: str) -> str:
    return clean_text(f"{reason[:1].lower()}{reason[1:]}", 120).replace("`", "")


# ---- plain data ------------------------------------------------------------------------------------------------------


class _TooMuch(ValueError):
    """Report a value that is too deep, too large or not plain data."""


def clean(value: object) -> Any:
    """Copy plain data, with printable text and string keys only; return ``None`` if it is not plain data."""
    try:
        return _clean(value, _MAX_DEPTH, [_MAX_VALUES])
    except _TooMuch:
        return None


def _clean(value: Any, depth: int, budget: list[int]) -> Any:
    kind = type(value)
    if kind is str:
        return clean_text(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -_INT64 <= value < 2 * _INT64 else None
    if kind is float:
        return value if math.isfinite(value) else None
    if kind not in (list, tuple, dict) or not depth:
        raise _TooMuch
    budget[0] -= len(value)
    if budget[0] < 0:
        raise _TooMuch
    if kind is dict:
        return {clean_text(k, 200): _clean(v, depth - 1, budget) for k, v in value.items() if isinstance(k, str)}
    return [_clean(v, depth - 1, budget) for v in value]


def _narrow(value: Any) -> Any:
    """Return plain data with ``None`` for unsigned integers of 64 bits, which only addresses can be."""
    if type(value) is int:
        return value if value < _INT64 else None
    if isinstance(value, dict):
        return {name: _narrow(inner) for name, inner in value.items()}
    return [_narrow(inner) for inner in value] if isinstance(value, list) else value
