"""A stand-in for a GPU's streams that finds every wrong order in which a real device could run a program's work.

Work runs at once, in the program's order, so that its values are right. What is checked is the order: work of two
streams that touches the same memory, at least one of it writing, must be ordered by a chain of waits (vector clocks, as
race detectors of threads use them). If it is not, a device may run it the other way round, and that is reported.

Memory counts too. A block that is freed is given to the next tensor of the stream it was allocated on, whatever other
streams still do with it; a new tensor's block may still be in use by that stream's earlier work.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Event:
    """What a stream had been given, and had itself waited for, when the event was recorded."""

    seen: dict[int, int]
    owner: Any = None

    def synchronize(self) -> None:
        """Let the host wait."""
        self.owner.host.wait_event(self)


class Stream:
    """One stream: counts its work, and knows how much of each stream's work is over before its next begins."""

    def __init__(self, owner: Device, name: str) -> None:
        self.owner, self.name, self.device = owner, name, torch.device("cpu")
        self.seen: dict[int, int] = {}
        self.count = 0

    def record_event(self) -> Event:
        return Event({**self.seen, id(self): self.count}, self.owner)

    def wait_event(self, event: Event) -> None:
        for stream, count in event.seen.items():
            self.seen[stream] = max(self.seen.get(stream, 0), count)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def comes_after(self, use: _Use) -> bool:
        """Whether the stream's next work begins only when that use is over."""
        return use.stream is self or self.seen.get(id(use.stream), 0) >= use.number


@dataclass(frozen=True)
class _Use:
    stream: Stream
    number: int
    start: int
    stop: int
    writes: bool
    what: str


class Device(TorchDispatchMode):
    """Streams and the memory they share; ``races`` says what is not ordered, ``copies`` counts them by stream."""

    def __init__(self) -> None:
        super().__init__()
        self.main = self.current = Stream(self, "main")
        self.side = Stream(self, "side")
        self.host = Stream(self, "host")
        self.races: list[str] = []
        self.copies = {"main": 0, "side": 0}
        self._uses: dict[int, list[_Use]] = {}
        self._host: set[int] = set()

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """What ``torch.cuda.stream`` does."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def host_memory(self, n_bytes: int, pin: bool) -> torch.Tensor:
        """Memory of the host: allocated by no stream."""
        slab = torch.empty(n_bytes, dtype=torch.uint8)
        self._uses.pop(slab.untyped_storage()._cdata, None)
        self._host.add(slab.untyped_storage()._cdata)
        return slab

    def keep_on_host(self, tensors: Any) -> None:
        """Take tensors as the host's: what touches no other memory is the host's own work."""
        self._host.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        storages = {t.untyped_storage()._cdata for t in given}
        new = [t for t in made if t.untyped_storage()._cdata not in storages]
        written = [args[0]] if func._schema.is_mutable else []
        if not new and not written:
            return out  # a view: nothing runs
        self._run(func.overloadpacket.__name__, given, [*new, *written])
        for tensor in new:
            storage = tensor.untyped_storage()
            weakref.finalize(storage, self._freed, storage._cdata, self.current)
        return out

    def _run(self, what: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        """Enqueue one piece of work. A new tensor's block counts as written: its stream may just have used it."""
        by_host = all(t.untyped_storage()._cdata in self._host for t in (*reads, *writes))
        stream = self.host if by_host else self.current
        if not by_host:  # the host has done what it did before it gives a stream work
            stream.wait_event(self.host.record_event())
        stream.count += 1
        self.copies[stream.name] = self.copies.get(stream.name, 0) + (what == "copy_")
        for tensor, is_write in [*((t, False) for t in reads), *((t, True) for t in writes)]:
            use = _Use(stream, stream.count, *_extent(tensor), is_write, what)
            self._check(tensor.untyped_storage()._cdata, use)

    def _check(self, storage: int, use: _Use) -> None:
        earlier = self._uses.setdefault(storage, [])
        for other in earlier:
            touch = other.start < use.stop and use.start < other.stop
            if touch and (other.writes or use.writes) and not use.stream.comes_after(other):
                self.races.append(
                    f"{use.what} on {use.stream.name} does not wait for {other.what} on {other.stream.name}"
                )
        if use.writes:  # what it covers is ordered before it, or was reported
            earlier[:] = [o for o in earlier if not (use.start <= o.start and o.stop <= use.stop)]
        earlier.append(use)

    def _freed(self, storage: int, home: Stream) -> None:
        """The block goes to the next tensor of its stream: what others do with it must be over for that stream."""
        for use in self._uses.pop(storage, []):
            if storage not in self._host and not home.comes_after(use):
                self.races.append(f"freed on {home.name} while {use.what} on {use.stream.name} may use it")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses a tensor lies between."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
