"""Describe values by all that decides which memory a layer takes, and make values of the same description again."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from memprof.compat import torch as torch_names
from memprof.simulate.shortcuts.results import SIMPLE, Making, facts_of, is_plain

__all__ = ["Many", "NotAlike", "Plain", "Stand", "Values", "constant_of", "rebuilt", "storage_key"]

_FakeTensor: Any = torch_names.FAKE_TENSOR.get()
storage_key = attrgetter(torch_names.STORAGE_KEY.name)


class NotAlike(Exception):
    """A layer, or a call of one, is not known to repeat another; the message says what stands in the way."""


class Plain(NamedTuple):
    """Describe a value that is its own description."""

    kind: type
    value: Any


class Inside(NamedTuple):
    """Describe a tensor: its number, that of its storage, its facts, and the number it holds where that is known."""

    number: int
    storage: int
    facts: tuple[Any, ...]
    constant: Any


class Many(NamedTuple):
    """Describe a list, a tuple or a dict."""

    kind: type
    names: tuple[Any, ...]
    parts: tuple[Any, ...]


Described = Plain | Inside | Many


class Values:
    """Describe values one after another, and number the storages and tensors that come up."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}
        self.tensors: list[Any] = []

    def add(self, value: Any) -> Described:
        """Describe a value.

        Raises:
            NotAlike: it is of a kind that is not known to say all about itself.
        """
        kind = type(value)
        if kind is _FakeTensor:
            return self._tensor(value)
        if kind in SIMPLE or isinstance(value, type):
            return Plain(kind, value)
        if isinstance(value, dict):
            return Many(kind, tuple(value), tuple(map(self.add, value.values())))
        if isinstance(value, (list, tuple)):
            return Many(kind, (), tuple(map(self.add, value)))
        raise NotAlike(f"a value of {kind.__name__}")

    def _tensor(self, tensor: Any) -> Inside:
        if not is_plain(tensor):
            raise NotAlike("a tensor that is not dense")
        number = self.storages.setdefault(storage_key(tensor.untyped_storage()), len(self.storages))
        self.tensors.append(tensor)
        return Inside(len(self.tensors) - 1, number, facts_of(tensor), constant_of(tensor))


def constant_of(tensor: Any) -> tuple[int, Any] | None:
    """Return how many numbers a fake tensor is known to hold, none or one, and the number; None where none is known.

    Raises:
        NotAlike: it is known to hold several.
    """
    constant = tensor.constant
    if constant is None:
        return None
    if constant.numel() > 1:
        raise NotAlike("a tensor of known values")
    return constant.numel(), constant.item() if constant.numel() else None


class Stand(NamedTuple):
    """Say how to make a value again: the tensor number ``same`` of those there before, or one made in the storage
    ``base``, an own one's number, or ``-1 - n`` for the storage of the tensor number ``n`` there before.

    ``constant`` is what the number held by that tensor becomes; it stays where ``changes`` is False.
    """

    same: int | None
    base: int
    make: Any
    changes: bool = False
    constant: Any = None


def rebuilt(described: Any, before: Sequence[Any], rooms: dict[int, Any], make: Making) -> Any:
    """Make a value of a description in which each tensor is a :class:`Stand`."""
    if isinstance(described, Plain):
        return described.value
    if isinstance(described, Many):
        kind: Any = described.kind
        parts = [rebuilt(part, before, rooms, make) for part in described.parts]
        if described.names or issubclass(described.kind, dict):
            return kind(zip(described.names, parts, strict=True))
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    if described.same is not None:
        tensor = before[described.same]
        if described.changes and described.constant is None:
            tensor.constant = None
        elif described.changes:
            make.hold(tensor.constant, described.constant[1])
        return tensor
    base = before[-1 - described.base] if described.base < 0 else rooms[described.base]
    return described.make([base])
