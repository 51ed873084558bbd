"""Write columns, timeline and attribution as plain data and a list of arrays, and build them again."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from typing import Any

import msgspec
import numpy as np

from memprof.attribution.result import Attribution, PhaseSpan, PhaseTrack
from memprof.snapshot.model import Blocks, Frame, Segments, Snapshot, StackTable, Trace
from memprof.snapshot.recorded_run import Annotation, RecordedRun
from memprof.timeline.reserved import Regions
from memprof.timeline.timeline import Timeline
from memprof.vocabulary import History, Kind

TYPES = ("|b1", "|u1", "<i4", "<i8")  # of arrays

_CLASSES: dict[str, Any] = {
    c.__name__: c
    for c in (Snapshot, Trace, Segments, Blocks, Timeline, Regions, Attribution, PhaseTrack, PhaseSpan, Kind, History)
}
_STRUCTS: dict[str, type[msgspec.Struct]] = {kind.__name__: kind for kind in (Annotation, RecordedRun)}


def written(value: Any, tables: list[Any]) -> Any:
    """Return plain data for ``value``: a dictionary has one key, which says what its content was.

    Raises:
        TypeError: it is of a type that is not kept.
    """
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.str in TYPES:
        tables.append(np.ascontiguousarray(value))
        return {"array": len(tables) - 1}
    if isinstance(value, StackTable):
        lengths = np.array([len(stack) for stack in value.stacks], np.int64)
        frames = np.array([frame for stack in value.stacks for frame in stack], np.int64)
        return {"stacks": [value.frames, written(lengths, tables), written(frames, tables)]}
    if isinstance(value, Enum) and type(value).__name__ in _CLASSES:
        return {type(value).__name__: value.value}
    if type(value).__name__ in _CLASSES and dataclasses.is_dataclass(value):
        fields = {f.name: written(getattr(value, f.name), tables) for f in dataclasses.fields(value)}
        return {type(value).__name__: fields}
    if type(value).__name__ in _STRUCTS:
        return {type(value).__name__: msgspec.to_builtins(value)}
    if type(value) in (dict, list) and is_json(value):
        return {"plain": value}
    if type(value) is dict:
        return {"dict": [[key, written(content, tables)] for key, content in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [written(content, tables) for content in value]}
    if value is None or type(value) in (str, int, float, bool):
        return value
    raise TypeError(f"a {type(value).__name__} is not kept")


def is_json(value: Any) -> bool:
    """Tell whether a value comes back from JSON as it was."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except TypeError:
        return False


def built(node: Any, tables: list[Any]) -> Any:
    """Return the object that :func:`written` wrote."""
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "array":
        return tables[content]
    if kind == "plain":
        return content
    if kind == "dict":
        return {key: built(part, tables) for key, part in content}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(built(part, tables) for part in content)
    if kind == "stacks":
        frames = [Frame(*frame) for frame in content[0]]
        ends = np.cumsum(built(content[1], tables)).tolist()
        ids = tuple(built(content[2], tables).tolist())
        return StackTable(frames, [ids[begin:end] for begin, end in zip([0, *ends], ends, strict=False)])
    if kind in _STRUCTS:
        return msgspec.convert(content, _STRUCTS[kind])
    fields = {name: built(part, tables) for name, part in content.items()} if type(content) is dict else None
    return _CLASSES[kind](content) if fields is None else _CLASSES[kind](**fields)
