"""Write a simulation's events and blocks in the form of torch's own memory snapshots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from memprof.allocator.model import CachingAllocator
from memprof.recording.frames import StackWriter
from memprof.simulate.recorder.plain_heap import PlainHeap

__all__ = ["Event", "write_snapshot"]

_SETTINGS = ("expandable_segments", "oldest_first")


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


def write_snapshot(
    events: Sequence[Event],
    allocator: CachingAllocator | PlainHeap,
    origins: Mapping[int, tuple[Any, str]],
    device: int,
    hidden: tuple[str, ...],
) -> dict[str, Any]:
    """Write plain dicts and lists, as torch does.

    Args:
        events: in order.
        allocator: whose segments are alive.
        origins: stack and tag of each live block, by address.
        device: its index; traces of those below it are empty.
        hidden: folders whose frames own no memory.
    """
    stacks = StackWriter(hidden)
    frames = stacks.write([e.captured for e in events])
    trace = [_entry(event, where) for event, where in zip(events, frames, strict=True)]
    segments = allocator.segments()
    _add_frames(segments, origins, stacks)
    return {
        "segments": segments,
        "device_traces": [*([] for _ in range(device)), trace],
        "allocator_settings": {name: getattr(allocator.settings, name) for name in _SETTINGS},
        "external_annotations": [],
    }


def _entry(event: Event, frames: Any) -> dict[str, Any]:
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


def _add_frames(segments: list[dict[str, Any]], origins: Mapping[int, tuple[Any, str]], stacks: StackWriter) -> None:
    blocks = [b for s in segments for b in s["blocks"] if b["state"] != "inactive"]
    known = [origins.get(b["address"], (None, "")) for b in blocks]
    for block, frames, (_, tag) in zip(blocks, stacks.write([c for c, _ in known]), known, strict=True):
        block["frames"] = frames
        block["user_metadata"] = tag
