"""Read off what one executed call of a layer asks of the allocator and leaves behind, and do it again for others."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from memprof.simulate.recorder.recorder import FakeRecorder
from memprof.simulate.recorder.rehearsal import Kernel, plain
from memprof.simulate.recorder.round_log import Born, CallLog, Claimed, Rehearsed
from memprof.simulate.shortcuts.layers.values import (
    Many,
    NotAlike,
    Plain,
    Stand,
    Values,
    constant_of,
    rebuilt,
    storage_key,
)
from memprof.simulate.shortcuts.results import Making

__all__ = ["Before", "Pattern", "Place"]


class Place(NamedTuple):
    """Say which layer is called: the names of its modules, itself first, and its number in the cache."""

    names: tuple[str, ...]
    number: int


class Before:
    """Know the tensors that a call was given, without holding them: weakly, and by storage and address."""

    def __init__(self, values: Values, recorder: FakeRecorder) -> None:
        self.tensors = [weakref.ref(tensor) for tensor in values.tensors]
        self.storages = dict(values.storages)
        self.of_storage: dict[int, int] = {}  # the first tensor of a storage, by the storage's number
        self.addresses: dict[int, int] = {}  # tensors' numbers, by address
        self.constants = [constant_of(tensor) for tensor in values.tensors]
        for number, tensor in enumerate(values.tensors):
            storage = _storage(tensor)
            self.of_storage.setdefault(values.storages[storage_key(storage)], number)
            if address := recorder.address_of(storage):
                self.addresses.setdefault(address, number)

    def storage_number(self, storage: Any) -> int | None:
        """Return the number of a storage that was there; None for a new one, which may lie where an old one lay."""
        number = self.storages.get(storage_key(storage))
        return number if number is not None and self.tensors[self.of_storage[number]]() is not None else None


class _Take(NamedTuple):
    nbytes: int
    stream: int
    captured: Any
    tag: str


class _TakeInRehearsal(NamedTuple):
    born: Any
    stream: int
    captured: Any


class _Give(NamedTuple):
    own: bool
    number: int


class _Claim(NamedTuple):
    number: int
    category: Any
    detail: str | None
    name: str | None


class Pattern:
    """Hold what a call did: its steps, with blocks by number, and what it left: a description of it, and its storages.

    Args:
        place: which layer it was.
        log: of the call.
        before: the tensors that were there.
        left: what the call returned, and the layer's part of the cache.

    Raises:
        NotAlike: it did what cannot be done again from a log.
    """

    def __init__(
        self, recorder: FakeRecorder, make: Making, place: Place, log: CallLog, before: Before, left: Sequence[Any]
    ) -> None:
        if not log.only_device:
            raise NotAlike("it takes or gives back host memory")
        self._recorder, self._make, self._log, self._place = recorder, make, log, place
        self._own: dict[int, int] = {}  # number of what is alive, by address
        self._streams: list[int] = []
        self.steps = list(self._read(log, before))
        self._rooms: dict[int, tuple[int, int, bool]] = {}  # own number -> bytes, stream, claimed
        values = Values()
        self.left = tuple(self._left(values.add(part), values, before) for part in left)
        if set(self._own.values()) != set(self._rooms):
            raise NotAlike("it leaves memory that neither its result nor its cache holds")
        self.key = self._key(values, left)

    # -- what was done ------------------------------------------------------------------------------------------

    def _read(self, log: CallLog, before: Before) -> Any:
        given = dict(before.addresses)
        for step in log.steps:
            if isinstance(step, (Born, Rehearsed)):
                self._own[step.address] = len(self._streams)
                self._streams.append(step.stream)
                if isinstance(step, Born):
                    yield _Take(step.nbytes, step.stream, step.captured, step.tag)
                else:
                    yield _TakeInRehearsal(step.born, step.stream, step.captured)
            elif isinstance(step, int):
                own = step in self._own
                if not own and step not in given:
                    raise NotAlike("it gives back what it was not given")
                yield _Give(own, self._own.pop(step) if own else given.pop(step))
            elif isinstance(step, Claimed):
                if step.address not in self._own:
                    raise NotAlike("it claims what it did not take")
                yield _Claim(self._own[step.address], step.category, step.detail, step.name)
            else:
                yield step

    def _left(self, described: Any, values: Values, before: Before) -> Any:
        """Replace the tensors of a description by what stands for them."""
        if isinstance(described, Plain):
            return described
        if isinstance(described, Many):
            return described._replace(parts=tuple(self._left(part, values, before) for part in described.parts))
        tensor = values.tensors[described.number]
        same = next((n for n, known in enumerate(before.tensors) if known() is tensor), None)
        if same is not None:
            if described.constant is not None and before.constants[same] is None:
                raise NotAlike("a tensor's value is known afterwards")
            return Stand(same, 0, None, described.constant != before.constants[same], described.constant)
        storage = _storage(tensor)
        number = before.storage_number(storage)
        address = self._recorder.address_of(storage)
        if address in self._own:
            base, room = self._own[address], self._make.room(storage.nbytes())
            claimed = self._recorder.owners is not None and self._recorder.owners.is_known(storage)
            self._rooms[base] = (storage.nbytes(), self._recorder.stream_at(storage), claimed)
        elif number is not None and address in before.addresses:
            base, room = -1 - before.of_storage[number], tensor
        else:
            raise NotAlike("it returns what it neither took nor was given")
        maker = self._make.maker_in(tensor, room)
        if maker is None:
            raise NotAlike("a tensor that it leaves cannot be made otherwise")
        return Stand(None, base, maker)

    # -- comparing ----------------------------------------------------------------------------------------------

    def _key(self, values: Values, left: Sequence[Any]) -> tuple[Any, ...]:
        """List all of it in words that do not depend on the layer."""
        any_layer = Place(tuple(f"?{number}" for number in range(len(self._place.names))), -1)
        steps = tuple(_plain(step) for step in self._said(any_layer))
        again = Values()
        described = tuple(again.add(part) for part in left)
        return steps, described, tuple(self._rooms.items()), tuple(map(_shown, self.left))

    def _said(self, place: Place) -> Iterator[Any]:
        """Go through the steps in another layer's names."""
        names = dict(zip(self._place.names, place.names, strict=True))
        head = f"layers.{self._place.number}."
        for step in self.steps:
            if isinstance(step, _Take):
                yield step._replace(tag=_renamed(step.tag, names))
            elif isinstance(step, _TakeInRehearsal) and (running := step.born.running) is not None:
                running = running._replace(name=names.get(running.name, running.name))
                yield step._replace(born=step.born._replace(running=running))
            elif isinstance(step, _Claim) and step.name is not None and step.name.startswith(head):
                yield step._replace(name=f"layers.{place.number}." + step.name.removeprefix(head))
            else:
                yield step

    # -- doing it again -----------------------------------------------------------------------------------------

    def repeat(self, place: Place, given: Sequence[Any]) -> list[Any]:
        """Take and give back what the call of another layer does; ``given``: the tensors that are there before.

        Returns:
            What the call returns, and the layer's part of the cache.

        Raises:
            OutOfMemory: the simulated device is full, with which the simulation ends.
        """
        recorder, own = self._recorder, dict[int, int]()
        recorder.repeat_work(self._log)
        self._repeat_steps(place, given, own)
        rooms = {}
        for number, (nbytes, stream, claimed) in self._rooms.items():
            rooms[number] = room = self._make.room(nbytes)
            recorder.let_stand(_storage(room), own[number], nbytes, stream)
            if claimed and recorder.owners is not None:
                recorder.owners.know(_storage(room))
        return [rebuilt(part, given, rooms, self._make) for part in self.left]

    def _repeat_steps(self, place: Place, given: Sequence[Any], own: dict[int, int]) -> None:
        recorder, rehearsal, count = self._recorder, self._recorder.rehearsal, 0
        for said in self._said(place):
            if isinstance(said, _Take):
                own[count] = recorder.take(said.nbytes, said.stream, said.captured, said.tag)
                count += 1
            elif isinstance(said, _Give):
                number = said.number
                recorder.release(own.pop(number) if said.own else recorder.let_go(_storage(given[number])))
            elif isinstance(said, _Claim):
                if recorder.owners is not None:
                    recorder.owners.claim_address(own[said.number], said.category, said.detail, said.name)
            elif rehearsal is None:
                raise AssertionError(said)
            elif isinstance(said, _TakeInRehearsal):
                own[count] = rehearsal.take(said.born, said.stream, said.captured)
                count += 1
            else:
                rehearsal.parts[-1].append(said)


def _renamed(tag: str, names: dict[str, str]) -> str:
    head, found, rest = tag.partition(";module=")
    name, semicolon, rest = rest.partition(";")
    return head + found + names.get(name, name) + semicolon + rest


def _storage(tensor: Any) -> Any:
    return tensor.untyped_storage()


def _shown(left: Any) -> Any:
    """Return what two layers' leavings must have in common."""
    if isinstance(left, Many):
        return tuple(map(_shown, left.parts))
    return left._replace(make=None) if isinstance(left, Stand) else left


def _plain(step: Any) -> Any:
    """Return what two layers' steps must have in common."""
    if isinstance(step, Kernel):
        return (step.func, plain((step.args, tuple(step.kwargs.items()), step.made)))
    if isinstance(step, _Take):
        return step._replace(captured=None)
    if isinstance(step, _TakeInRehearsal):
        running = step.born.running
        born = step.born._replace(running=running and running._replace(key=0))
        return step._replace(born=born, captured=None)
    return step
