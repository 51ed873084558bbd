"""Read and write memprof's JSON, and generate its JSON Schema from the model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from inspect import cleandoc
from typing import Any, TypeVar

import msgspec

from memprof.errors import InputError
from memprof.report.base import Model
from memprof.text import clean_text

_MAX_DEPTH = 50
_M = TypeVar("_M", bound=Model)


@cache
def answers() -> dict[str, type[Model]]:
    """Return every answer that has a schema of its own, by the text of its ``schema`` field."""
    from memprof.report.comparison import Comparison
    from memprof.report.oom import ExplainedText
    from memprof.report.plan import Plan, Serving
    from memprof.report.report import Explanation, Report

    return {schema_name(kind): kind for kind in (Report, Explanation, Comparison, Plan, Serving, ExplainedText)}


def schema_name(kind: type[Model]) -> str:
    """Return the name of an answer's schema, such as ``memprof.report/1``."""
    return str(kind.__struct_config__.tag)


def to_json(answer: Model, indent: int | None = 1) -> str:
    """Return standard JSON, ASCII only, that ends in a newline; numbers that JSON lacks become strings."""
    return dumps(msgspec.to_builtins(answer), indent)


def to_builtins(answer: Model) -> dict[str, Any]:
    """Return the answer as JSON's own types, for a caller who wants a dictionary."""
    plain: dict[str, Any] = _lists(msgspec.to_builtins(answer))
    return plain


def plain_entries(entries: Iterable[Model]) -> list[dict[str, Any]]:
    """Return parts of an answer as JSON's own types."""
    return [to_builtins(entry) for entry in entries]


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def dumps(plain: Mapping[str, Any], indent: int | None = 1) -> str:
    """Return JSON's own types as text, as :func:`to_json` does."""
    separators = (",", ":") if indent is None else None
    try:
        text = json.dumps(plain, indent=indent, separators=separators, allow_nan=False)
    except (TypeError, ValueError):  # a mapping that is no dict, or a number that JSON does not have
        text = json.dumps(_finite(plain), indent=indent, separators=separators, allow_nan=False)
    return text + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def from_builtins(plain: object, kind: type[_M]) -> _M:
    """Validate plain data against a part of the model.

    Raises:
        InputError: it is not what the model says; the message names the first place that differs.
    """
    try:
        return msgspec.convert(plain, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InputError(f"not a report that memprof understands: {_reason(error)}.") from None


def redacted(answer: _M, beside: object = None) -> _M:
    """Return an answer without paths, names and tokens; ``beside`` is what else is known of the run: names in it are
    hidden too."""
    from memprof.redact import redact

    return from_builtins(redact(to_builtins(answer), beside), type(answer))


def redacted_parts(parts: Sequence[_M], beside: object = None) -> tuple[_M, ...]:
    """Return parts of an answer, as :func:`redacted` does; a name in one is hidden in all."""
    from memprof.redact import redact

    clean = redact(plain_entries(parts), beside)
    return tuple(from_builtins(plain, type(part)) for plain, part in zip(clean, parts, strict=True))


def parse(text: bytes) -> Model | str | None:
    """Parse JSON: one of memprof's answers, the name of a memprof schema that is not known here, or ``None``.

    Text in it is made printable: control characters and terminal escapes are replaced.

    Raises:
        ValueError: the JSON is damaged, or nested too deep.
        InputError: it is not what its schema says.
    """
    try:
        plain = _clean(_decoded(text), _MAX_DEPTH)
    except RecursionError:
        raise ValueError("nested deeper than any report") from None
    name = plain.get("schema") if isinstance(plain, dict) else None
    if not isinstance(name, str) or not name.startswith("memprof."):
        return None
    return from_builtins(plain, answers()[name]) if name in answers() else name


class _TooMuch(ValueError):
    """A value that no report has: too deep, too long or not finite."""


def _decoded(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        # Half a surrogate pair, as in the path of a file whose name is not UTF-8, is text to Python's parser.
        return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON's")


def _clean(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, int) and abs(value) >= 10**20:
        raise _TooMuch(f"an integer of {len(str(value))} digits")
    if isinstance(value, float) and not math.isfinite(value):
        raise _TooMuch("a number that is not finite")
    if isinstance(value, (dict, list)) and not depth:
        raise _TooMuch("nested deeper than any report")
    if isinstance(value, dict):
        return {clean_text(key): _clean(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item, depth - 1) for item in value]
    return value


def _reason(error: Exception) -> str:
    """Return what is wrong and where, as ``expected `int`, got `str` (at peak/step)``."""
    what, _, path = str(error).partition(" - at `")
    where = path.rstrip("`").removeprefix("$").lstrip(".").replace("[...]", "").replace(".", "/")
    return clean_text(f"{what[:1].lower()}{what[1:]} (at {where or 'the top level'})", 300)


@cache
def schema() -> dict[str, Any]:
    """Return the JSON Schema of every answer, with the descriptions of the model's docstrings."""
    from memprof.report.counters import LINES

    kinds = tuple(answers().values())
    (references, parts) = msgspec.json.schema_components((*kinds, *LINES), ref_template="#/$defs/{name}")
    kinds_by_name = {kind.__name__: kind for kind in _subclasses(Model)}
    for name, part in parts.items():
        if name in kinds_by_name:  # others are enums
            _describe(part, kinds_by_name[name])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"memprof's JSON: {', '.join(answers())}",
        "description": "Sizes are bytes, times microseconds on the recording's own clock. Keys may be added within a "
        "version; none is removed or changes its meaning.",
        "oneOf": list(references)[: len(kinds)],
        "$defs": parts,
    }


def _describe(part: dict[str, Any], kind: type[Model]) -> None:
    """Move a class's docstring into its schema: the first part as description, ``Attributes:`` to the properties."""
    summary, fields = described(kind)
    part["description"] = summary
    for field in msgspec.structs.fields(kind):
        if field.name in fields:
            part["properties"][field.encode_name]["description"] = fields[field.name]


def described(kind: type[Model]) -> tuple[str, dict[str, str]]:
    """Return the summary of a class of the model and the description of each of its fields, as its docstring has them.

    A field that the class inherits is described by its base.
    """
    fields: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        fields |= _attributes(base.__doc__ or "")
    return cleandoc(kind.__doc__ or "").partition("\nAttributes:\n")[0].strip(), fields


def _attributes(docstring: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    name = ""
    for line in cleandoc(docstring).partition("\nAttributes:\n")[2].splitlines():
        indent = len(line) - len(line.lstrip())
        if indent == 4:
            name, _, text = line.strip().partition(": ")
            fields[name] = text
        elif name and line.strip():
            fields[name] += f" {line.strip()}"
    return fields


def _subclasses(kind: type[Model]) -> Iterator[type[Model]]:
    for inner in kind.__subclasses__():
        yield inner
        yield from _subclasses(inner)
