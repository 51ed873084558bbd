"""Define what every part of the model is made of: the base class, units, and defaults that are written out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from memprof.vocabulary import Category, Evidence, Group

#: A size in bytes, up to 2**63 - 1.
Bytes = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
#: A count of things.
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
#: The most ranks that a file may name.
MOST_RANKS = 1 << 17
#: The number of a process in a distributed run.
Rank = Annotated[int, msgspec.Meta(ge=0, le=MOST_RANKS)]
#: A number that is never negative, such as a share or a duration in seconds.
Positive = Annotated[float, msgspec.Meta(ge=0)]
#: A share of a whole, 0 to 1.
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
#: Settings of a run under the names of the classes they come from (``GRPOConfig``, ``LoraConfig``): any JSON value.
Settings = dict[str, Any]
#: A stack, innermost first, each frame ``file:line function``.
Stack = tuple[str, ...]


def _named(definition: str) -> msgspec.Meta:
    """Describe the keys of a mapping in the JSON Schema, which msgspec leaves out."""
    return msgspec.Meta(extra_json_schema={"propertyNames": {"$ref": f"#/$defs/{definition}"}})


ByCategory = Annotated[Mapping[Category, Bytes], _named("Category")]
ByGroup = Annotated[Mapping[Group, Bytes], _named("Group")]
ByEvidence = Annotated[Mapping[Evidence, Bytes], _named("Evidence")]
DetailsByCategory = Annotated[Mapping[Category, Mapping[str, Bytes]], _named("Category")]

_T = TypeVar("_T")


class Model(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of every part of the model: immutable, compared by value, built with keywords."""


def written(value: _T) -> _T:
    """Return a field's default that appears in the JSON, which leaves out other defaults; ``value`` is immutable."""
    default: _T = msgspec.field(default_factory=lambda: value)
    return default


def known(value: _T | msgspec.UnsetType | None) -> _T | None:
    """Return the value of a field that may be missing, ``None`` if it is missing."""
    return None if isinstance(value, msgspec.UnsetType) else value
