"""Fill the gaps in a thinned history with what changed across them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memprof.recording.cuda.copying import copied
from memprof.recording.frames import Stack
from memprof.recording.recorder import Segment, Trace, TraceEntry

#: Kinds of events that say what happens to a block.
BLOCK_EVENTS = ["alloc", "free_requested", "free_completed"]
_HELD = "active_allocated"
# Freed by the program, and kept until a stream has done with it; torch has two names for it.
_PENDING = ("active_pending_free", "active_awaiting_free")


class Gap(NamedTuple):
    """Hold a stretch that was not recorded, and by device the events that lead from its beginning to its end.

    In one of the program's (``is_programs``) some kinds of events may have been recorded, others not.
    """

    begin_us: int
    end_us: int
    events: dict[int, Trace]
    is_programs: bool = False


def block_changes(before: list[Segment], after: list[Segment]) -> dict[int, Trace]:
    """Return by device the trace entries, without times, that lead from one state of the allocator to another.

    A block that waits for a stream has been asked to be freed, and its free completes when it is gone: neither is
    written twice. One that was freed and came back with the same address and requested size counts as the same.
    """
    old, new = _active_blocks(before), _active_blocks(after)
    events: dict[int, Trace] = {}
    # Frees come first: what is new may lie where something else was.
    for key, block in old.items():
        now = new.get(key)
        if not block.is_pending and (now is None or now.is_pending):
            _say(events, "free_requested", key, block)
        if now is None or (block.is_pending and not now.is_pending):
            _say(events, "free_completed", key, block)
    for key, block in new.items():
        known = old.get(key)
        if known is None or (known.is_pending and not block.is_pending):
            _say(events, "alloc", key, block)
            if block.is_pending:
                _say(events, "free_requested", key, block)
    return events


def fill_gaps(trace: Trace, gaps: list[Gap], device: int) -> Trace:
    """Return a device's trace with each gap's events at the gap's end; ``gaps`` in order of time."""
    out: Trace = []
    position = 0
    for gap in gaps:
        start = position
        while position < len(trace) and trace[position].get("time_us", 0) <= gap.end_us:
            position += 1
        out += trace[start:position]
        for event in copied(gap.events.get(device, [])):
            event["time_us"] = gap.end_us
            out.append(event)
    return out + trace[position:]


def without_partial(trace: Trace, gaps: Sequence[Gap]) -> Trace:
    """Return a trace without the events of blocks that a program's gap has recorded: some of their kinds only."""
    partial = [gap for gap in gaps if gap.is_programs]
    if not partial:
        return trace
    return [
        entry
        for entry in trace
        if entry["action"] not in BLOCK_EVENTS
        or not any(gap.begin_us < entry["time_us"] <= gap.end_us for gap in partial)
    ]


class _ActiveBlock(NamedTuple):
    """Hold what an event says of a block in use; ``is_pending``: it waits for a stream."""

    stream: int
    frames: Stack
    is_pending: bool


def _active_blocks(segments: list[Segment]) -> dict[tuple[int, int, int], _ActiveBlock]:
    """Return the blocks in use by device, address and requested size."""
    found = {}
    for segment in segments:
        address, device = segment["address"], segment.get("device", 0)
        for block in segment["blocks"]:
            at = block.get("address", address)
            is_pending = block["state"] in _PENDING
            if is_pending or block["state"] == _HELD:
                key = (device, at, block.get("requested_size", block["size"]))
                found[key] = _ActiveBlock(segment.get("stream", 0), block.get("frames") or [], is_pending)
            address += block["size"]
    return found


def _say(events: dict[int, Trace], action: str, key: tuple[int, int, int], block: _ActiveBlock) -> None:
    device, address, size = key
    entry: TraceEntry = {
        "action": action,
        "addr": address,
        "size": size,
        "stream": block.stream,
        "frames": block.frames,
    }
    events.setdefault(device, []).append(entry)
