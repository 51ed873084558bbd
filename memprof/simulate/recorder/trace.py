"""Keep a simulation's events, and write them in the form of torch's own memory snapshots."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from memprof.allocator.model import CachingAllocator
from memprof.foreign import RawRecord, SnapshotFile
from memprof.recording.frames import StackWriter
from memprof.simulate.recorder.plain_heap import PlainHeap


class Event(NamedTuple):
    """Hold one entry of the trace; sizes are bytes, time is a count, ``captured`` a stack not yet written."""

    action: str
    address: int
    size: int
    time: int
    stream: int
    pool: int
    captured: Any
    tag: str


class AllocatorTrace:
    """Hold the events of an allocator, each with the stack and tag of what asks for memory then.

    ``now`` counts events and marks: nothing is executed, so there is nothing to clock.
    """

    def __init__(self, heap: CachingAllocator | PlainHeap) -> None:
        self.events: list[Event] = []
        self.now = 0
        self._heap = heap
        self._cause: tuple[Any, str] = (None, "")
        self._origins: dict[int, tuple[Any, str]] = {}
        heap.on_event = self._add

    def asks(self, captured: Any, tag: str) -> None:
        """Give events from now on this stack and tag."""
        self._cause = (captured, tag)

    def took(self, address: int, captured: Any, tag: str) -> None:
        """Keep the stack and tag of the block at ``address``."""
        self._origins[address] = (captured, tag)

    def gives(self, address: int) -> None:
        """Forget the block at ``address``; events from now on have no stack."""
        self._cause = (None, "")
        self._origins.pop(address, None)

    @contextlib.contextmanager
    def without_blocks(self, cause: Callable[[], tuple[Any, str]]) -> Iterator[None]:
        """Suppress the events of blocks while open; ``cause``: stack and tag of other events."""

        def of_segments(action: str, address: int, size: int, stream: int, pool: int) -> None:
            self._cause = cause()
            self._add(action, address, size, stream, pool)

        heap = self._heap
        assert isinstance(heap, CachingAllocator)
        heap.on_event, heap.tells_blocks = of_segments, False
        try:
            yield
        finally:
            heap.on_event, heap.tells_blocks = self._add, True

    def move(self, before: Iterable[tuple[int, int, int]], now: Iterable[tuple[int, int, int, Any, str]]) -> None:
        """Add the events of blocks that lie elsewhere now: address, bytes, stream; and ``now`` their stack and tag."""
        for address, size, stream in before:
            self.gives(address)
            self._add("free_requested", address, size, stream, 0)
            self._add("free_completed", address, size, stream, 0)
        for address, size, stream, captured, tag in now:
            self.asks(captured, tag)
            self.took(address, captured, tag)
            self._add("alloc", address, size, stream, 0)

    def written(self, device: int, hidden: tuple[str, ...]) -> SnapshotFile:
        """Return plain dicts and lists, as torch does, for the device's index; frames in ``hidden`` own no memory."""
        stacks = StackWriter(hidden)
        frames = frames_of([e.captured for e in self.events], stacks)
        trace = [_entry(event, where) for event, where in zip(self.events, frames, strict=True)]
        segments = self._heap.segments()
        _add_frames(segments, self._origins, stacks)
        return {
            "segments": segments,
            "device_traces": [*([] for _ in range(device)), trace],
            "allocator_settings": self._heap.settings.to_snapshot(),
            "external_annotations": [],
        }

    def _add(self, action: str, address: int, size: int, stream: int, pool: int) -> None:
        self.now += 1
        self.events.append(Event(action, address, size, self.now, stream, pool, *self._cause))


def _entry(event: Event, frames: Any) -> RawRecord:
    row = {
        "action": event.action,
        "addr": event.address,
        "size": event.size,
        "stream": event.stream,
        "segment_pool_id": (0, event.pool),
        "time_us": event.time,
        "compile_context": "",
        "user_metadata": event.tag,
        "frames": frames,
    }
    if event.action == "oom":
        row["device_free"] = row.pop("addr")
    return row


def frames_of(captured: list[Any], stacks: StackWriter) -> list[Any]:
    """Return the frames of stacks, some of which a program has written already."""
    written = stacks.write([None if isinstance(stack, list) else stack for stack in captured])
    return [one if isinstance(one, list) else frames for one, frames in zip(captured, written, strict=True)]


def _add_frames(segments: list[RawRecord], origins: Mapping[int, tuple[Any, str]], stacks: StackWriter) -> None:
    blocks = [b for s in segments for b in s["blocks"] if b["state"] != "inactive"]
    known = [origins.get(b["address"], (None, "")) for b in blocks]
    for block, frames, (_, tag) in zip(blocks, frames_of([c for c, _ in known], stacks), known, strict=True):
        block["frames"] = frames
        block["user_metadata"] = tag
