"""Make mutants of every field that a snapshot file can have, from the classes that read it.

A field that is added to :class:`memprof.snapshot.recorded_run.RecordedRun`, or to a class in it, is mutated without a
change here: :func:`example_of` fills it by its type.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import msgspec

from benchmarks.faults import inputs as valid

#: Values of other types, and numbers and texts that no field expects.
JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, -(2**31), 2**40, 2**60 + 1, 2**62, 2**63 - 1, -(2**63), 2**63, 2**64 - 1, 2**64,
    10**19, 0.5, -1.5, 1e300, "", "x", "1", "\x1b[31m", "\ud800", "x" * 5000, "weights", "peak", "../..", [], [[]],
    {}, {"": None}, {"x": {"y": [1]}}, [None], [1, "x"], [[1, 2, 3, 4, 5, 6, 7]], ["x"] * 3, (1, 2),
)  # fmt: skip
#: Number of containers in each other of :func:`nested`: more than a reader accepts.
_DEPTH = 40


def example_of(kind: Any) -> Any:
    """Return plain data that a type accepts, with a value in every field of its classes."""
    return _example(msgspec.inspect.type_info(kind), ())


def _example(info: msgspec.inspect.Type, above: tuple[type, ...]) -> Any:
    if isinstance(info, msgspec.inspect.Metadata):
        return _example(info.type, above)
    if isinstance(info, msgspec.inspect.StructType):
        if info.cls in above:
            return None  # a row that may contain one of its own kind
        above = (*above, info.cls)
        fields = {field.encode_name: _example(field.type, above) for field in info.fields}
        return list(fields.values()) if info.array_like else fields
    if isinstance(info, msgspec.inspect.UnionType):
        return _example(next(part for part in info.types if not isinstance(part, msgspec.inspect.NoneType)), above)
    if isinstance(info, (msgspec.inspect.VarTupleType, msgspec.inspect.ListType)):
        return [_example(info.item_type, above)] * max(1, info.min_length or 0)
    if isinstance(info, msgspec.inspect.DictType):
        return {_example(info.key_type, above): _example(info.value_type, above)}
    if isinstance(info, msgspec.inspect.EnumType):
        return next(iter(info.cls)).value
    if isinstance(info, msgspec.inspect.LiteralType):
        return info.values[0]
    simple: dict[type[msgspec.inspect.Type], Any] = {
        msgspec.inspect.IntType: 1,
        msgspec.inspect.FloatType: 0.5,
        msgspec.inspect.StrType: "text",
        msgspec.inspect.BoolType: True,
        msgspec.inspect.AnyType: {"any": [1, "x"]},
    }
    return simple[type(info)]


def snapshots() -> list[dict[str, Any]]:
    """Return valid snapshots that have every field between them: one of memprof's, and one of PyTorch's alone."""
    from memprof.snapshot.recorded_run import Annotation, RecordedRun

    own = valid.snapshot()
    run = _filled(own["memprof"], example_of(RecordedRun))
    run["holders"] = [[*row[:2], *row[2]] if isinstance(row[2], list) else row for row in run["holders"]]
    run["oom"].pop("device", None)
    foreign = valid.foreign_snapshot()
    for raw in (own, foreign):
        raw["external_annotations"] = [_filled(row, example_of(Annotation)) for row in valid.annotations(raw)]
        raw["allocator_settings"] = valid.allocator_settings()
    return [{**own, "memprof": run}, foreign]


def answers(seeds: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an answer of each kind with every field of its model.

    Args:
        seeds: a valid ``report`` and a valid ``compare``, whose values are kept.
    """
    from memprof.report.codec import answers

    known = {"memprof.report/1": seeds["report"], "memprof.compare/1": seeds["compare"]}
    found = []
    for name, kind in answers().items():
        example = {"schema": name, **example_of(kind)}
        found.append(_filled(known[name], example) if name in known else example)
    return found


def _filled(value: Any, example: Any) -> Any:
    """Return plain data with the fields added that only the example has."""
    if isinstance(value, dict) and isinstance(example, dict):
        return {**example, **{name: _filled(inner, example.get(name)) for name, inner in value.items()}}
    if isinstance(value, list) and isinstance(example, list) and example:
        return [_filled(inner, example[0]) for inner in value]
    return value


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where everything in plain data stands, as the keys and positions that lead to it."""
    if above:
        yield above
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from places(inner, (*above, name))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from places(inner, (*above, index))


def fields_of(raw: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return one place for each field of a snapshot: of lists whose entries are alike, those of the first and last."""
    found: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for place in places(raw):
        rows = place[0] in ("segments", "device_traces", "external_annotations")
        pattern = tuple("*" if rows and isinstance(key, int) else key for key in place)
        kind = _value(raw, place[: 3 if place[0] == "device_traces" else 2]) if len(place) > 2 else None
        action = kind.get("action", "") if isinstance(kind, dict) else ""
        found.setdefault((*pattern, action), place)
    return list(found.values())


def _value(plain: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        plain = plain[key]
    return plain


def nested(inner: Any, depth: int = _DEPTH) -> Any:
    """Return a value inside so many lists and records."""
    for level in range(depth):
        inner = [inner] if level % 2 else {"x": inner}
    return inner


def replaced(raw: dict[str, Any], place: tuple[Any, ...], junk: Any) -> dict[str, Any]:
    """Return a copy of plain data with another value in one place."""
    mutant: dict[str, Any] = pickle.loads(pickle.dumps(raw))
    *above, last = place
    holder: Any = mutant
    for key in above:
        if isinstance(holder[key], tuple):
            holder[key] = list(holder[key])
        holder = holder[key]
    holder[last] = copy.deepcopy(junk)
    return mutant


def mutants(each: int | None = None, start: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield mutants of every field with values of :data:`JUNK`, and what was changed.

    Args:
        each: number of values for each field. Fields take turns, so that all together get all values. Default: all.
        start: the number of the first value.
    """
    for raw in snapshots():
        for number, place in enumerate(fields_of(raw), start):
            value = _value(raw, place)
            junk = (*JUNK, nested(value), [value] * 2)
            for turn in range(len(junk) if each is None else each):
                chosen = junk[(number * 7 + turn) % len(junk)]
                yield f"{place} = {chosen!r:.80}", replaced(raw, place, chosen)
