"""Log what a piece of a run would ask of the allocator, without asking it: what a decoding step does, to repeat it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from memprof.foreign import Kwargs
from memprof.recording.trace.snapshot_format import StorageBirth
from memprof.vocabulary import Category

#: Addresses from here on are a rehearsal's; no device has them.
REHEARSED = 1 << 60


class Taken(NamedTuple):
    """Record an allocation: its tensor (``born``, of ``born.nbytes`` bytes), its stream and its stack."""

    born: StorageBirth
    stream: int
    captured: Any


class Given(NamedTuple):
    """Record a free: of the block that was allocation number ``place`` in the part ``part``."""

    part: int
    place: int


class LoggedOwner(NamedTuple):
    """Record that the block ``place`` of the part ``part`` was given a category."""

    part: int
    place: int
    category: Category
    detail: str | None
    name: str | None


class Kernel(NamedTuple):
    """A call of an operation; its kernel may take memory beside its results, as its arguments' shapes decide."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Kwargs
    made: Sequence[Any]


class Workspace(NamedTuple):
    """cuBLAS was used, which takes its workspace where it has none."""


Logged = Taken | Given | LoggedOwner | Kernel | Workspace


class Meta:
    """Stand for a tensor of which only its shape, strides and dtype are asked."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.strides, self.dtype = shape, strides, dtype

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return int(self.dtype.itemsize)


class Rehearsal:
    """Hold the log of each part, ``parts``; :meth:`cut` begins the next one.

    ``usable`` becomes False where something was done that cannot be repeated from a log.
    """

    def __init__(self) -> None:
        self.parts: list[list[Logged]] = [[]]
        self.usable = True
        self._taken = 0
        self._next = REHEARSED
        self._alive: dict[int, tuple[int, int]] = {}

    @property
    def alive(self) -> int:
        """Count the blocks that were not given back."""
        return len(self._alive)

    def cut(self) -> None:
        self.parts.append([])
        self._taken = 0

    def take(self, born: StorageBirth, stream: int, captured: Any) -> int:
        """Log an allocation; return an address that stands for it."""
        self._next += 1
        self._alive[self._next] = (len(self.parts) - 1, self._taken)
        self._taken += 1
        self.parts[-1].append(Taken(born, stream, captured))
        return self._next

    def give(self, address: int) -> None:
        self.parts[-1].append(Given(*self._alive.pop(address)))

    def claim(self, address: int, category: Category, detail: str | None, name: str | None) -> None:
        if address in self._alive:
            self.parts[-1].append(LoggedOwner(*self._alive[address], category, detail, name))
        else:
            self.usable = False

    def kernel(self, call: Kernel) -> None:
        self.parts[-1].append(call._replace(args=shapes_only(call.args), made=shapes_only(call.made)))

    def workspace(self) -> None:
        self.parts[-1].append(Workspace())


def shapes_only(values: Any) -> Any:
    """Replace the tensors in nested lists and tuples by what stands for them."""
    if isinstance(values, (list, tuple)):
        return tuple(shapes_only(value) for value in values)
    if hasattr(values, "untyped_storage"):
        return Meta(tuple(values.shape), tuple(values.stride()), values.dtype)
    return values


def plain(value: Any) -> Any:
    """Replace what stands for tensors in nested tuples by what can be compared."""
    if isinstance(value, Meta):
        return (value.shape, value.strides, value.dtype)
    return tuple(plain(part) for part in value) if isinstance(value, tuple) else value
