"""Log what a simulated run asks of the allocator and of its session, so that it can be repeated without the run."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from memprof.allocator.model import CachingAllocator
from memprof.foreign import RawRecord
from memprof.simulate.recorder.session import FakeSession
from memprof.vocabulary import Category

#: A stack as a snapshot has it: innermost frame first.
Frames = list[RawRecord]


class ProgramAllocation(NamedTuple):
    """A block: its bytes and stream, and the tag and stack of what asked for it."""

    nbytes: int
    stream: int
    tag: str
    frames: Frames | None = None


class Free(NamedTuple):
    """The block of allocation ``number``, counted from 0, is freed."""

    number: int


class OwnerAssignment(NamedTuple):
    """The block of allocation ``number`` gets an owner."""

    number: int
    category: str
    detail: str | None
    name: str | None


class Call(NamedTuple):
    """A method of the session is called, or the allocator's ``empty_cache``. A phase stands for itself by its number,
    counted from 0 in the order in which phases were entered."""

    name: str
    arguments: tuple[Hashable, ...] = ()


Entry = ProgramAllocation | Free | OwnerAssignment | Call

_CALLS = ("set_step", "add_tokens", "add_batch", "add_lengths", "enter_phase", "exit_phase")
_EMPTIES = "empty_cache"


class ProgramLog:
    """Log a session from now on. ``refused`` says what was done that cannot be repeated from a log."""

    def __init__(self, session: FakeSession) -> None:
        self.entries: list[Entry] = []
        self.allocations = 0
        self.refused: str | None = None
        self._session = session
        self._numbers: dict[int, int] = {}  # of the blocks in use, by address
        self._marks: dict[int, int] = {}
        self._inside = False
        self._kept: list[Any] = []  # marks, whose ids stay theirs
        self._watch_blocks()
        for name in _CALLS:
            self._watch_call(name)

    def _watch_blocks(self) -> None:
        blocks, owners = self._session.fake_recorder.blocks, self._session.book
        take, release, claim, generating = blocks.take, blocks.release, owners.claim_address, self._session.generating

        def taken(nbytes: int, stream: int, captured: Any, tag: str) -> int:
            address = take(nbytes, stream, captured, tag)
            self._numbers[address] = self.allocations
            self.allocations += 1
            self.entries.append(ProgramAllocation(nbytes, stream, tag))
            return address

        def released(address: int) -> None:
            release(address)
            if (number := self._numbers.pop(address, None)) is not None:
                self.entries.append(Free(number))

        def claimed(address: int, category: Category, detail: str | None, name: str | None) -> None:
            claim(address, category, detail, name)
            if blocks.rehearsal is not None:
                return
            if (number := self._numbers.get(address)) is None:
                self.refused = "a block of unknown origin has an owner"
            else:
                self.entries.append(OwnerAssignment(number, category.value, detail, name))

        def unlogged() -> AbstractContextManager[None]:
            self.refused = "all steps of a generation are played on the allocator's model"
            return generating()

        _put(blocks, take=taken, release=released)
        _put(owners, claim_address=claimed)
        _put(self._session, generating=unlogged)
        heap = self._session.fake_recorder.allocator
        if isinstance(heap, CachingAllocator):
            empty = heap.empty_cache

            def emptied() -> None:
                self.entries.append(Call(_EMPTIES))
                empty()

            _put(heap, empty_cache=emptied)

    def _watch_call(self, name: str) -> None:
        call = getattr(self._session, name)

        def called(*given: Any, **named: Any) -> Any:
            if self._inside or named:
                self.refused = self.refused or (f"{name} was called with names" if named else None)
                return call(*given, **named)
            self._inside = True
            try:
                result = call(*given)
            finally:
                self._inside = False
            arguments: tuple[Hashable, ...] = given
            if name == "exit_phase":
                arguments = (self._marks[id(given[0])],)
            elif name == "add_lengths":
                arguments = (tuple(tuple(pair) for pair in given[0]),)
            elif name == "enter_phase":
                self._marks[id(result)] = len(self._kept)
                self._kept.append(result)
            # What a call claims comes before all else that it does, so it stands behind its claims.
            self.entries.append(Call(name, arguments))
            return result

        _put(self._session, **{name: called})


def _put(thing: Any, **methods: Any) -> None:
    """Replace methods of one object, which lasts no longer than its simulation."""
    for name, method in methods.items():
        setattr(thing, name, method)


def play(session: FakeSession, entries: Sequence[Entry]) -> None:
    """Do on a session's device what a program says.

    Raises:
        OutOfMemory: the simulated device is full.
    """
    blocks, owners = session.fake_recorder.blocks, session.book
    heap: Any = session.fake_recorder.allocator
    addresses: list[int] = []
    marks: list[Any] = []
    for entry in entries:
        if isinstance(entry, ProgramAllocation):
            addresses.append(blocks.take(entry.nbytes, entry.stream, entry.frames, entry.tag))
        elif isinstance(entry, Free):
            blocks.release(addresses[entry.number])
        elif isinstance(entry, OwnerAssignment):
            owners.claim_address(addresses[entry.number], Category(entry.category), entry.detail, entry.name)
        elif entry.name == _EMPTIES:
            heap.empty_cache()
        elif entry.name == "exit_phase":
            session.exit_phase(marks[int(str(entry.arguments[0]))])
        elif entry.name == "enter_phase":
            marks.append(session.enter_phase(*entry.arguments))  # type: ignore[arg-type]
        else:
            getattr(session, entry.name)(*map(_as_given, entry.arguments))


def _as_given(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
