"""Fill the gaps in a thinned history with what changed across them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from memprof.recording.cuda.copying import copied

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
    events: dict[int, list[dict[str, Any]]]
    is_programs: bool = False


def block_changes(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Return by device the trace entries, without times, that lead from one state of the allocator to another.

    A block that waits for a stream has been asked to be freed, and its free completes when it is gone: neither is
    written twice. One that was freed and came back with the same address and requested size counts as the same.
    """
    old, new = _active_blocks(before), _active_blocks(after)
    events: dict[int, list[dict[str, Any]]] = {}
    # Frees come first: what is new may lie where something else was.
    for key, block in old.items():
        now = new.get(key)
        if not block["pending"] and (now is None or now["pending"]):
            _say(events, "free_requested", key, block)
        if now is None or (block["pending"] and not now["pending"]):
            _say(events, "free_completed", key, block)
    for key, block in new.items():
        known = old.get(key)
        if known is None or (known["pending"] and not block["pending"]):
            _say(events, "alloc", key, block)
            if block["pending"]:
                _say(events, "free_requested", key, block)
    return events


def fill_gaps(trace: list[dict[str, Any]], gaps: list[Gap], device: int) -> list[dict[str, Any]]:
    """Return a device's trace with each gap's events at the gap's end; ``gaps`` in order of time."""
    out: list[dict[str, Any]] = []
    position = 0
    for gap in gaps:
        start = position
        while position < len(trace) and trace[position].get("time_us", 0) <= gap.end_us:
            position += 1
        out += trace[start:position]
        out += [{**event, "time_us": gap.end_us} for event in copied(gap.events.get(device, []))]
    return out + trace[position:]


def without_partial(trace: list[dict[str, Any]], gaps: Sequence[Gap]) -> list[dict[str, Any]]:
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


def _active_blocks(segments: list[dict[str, Any]]) -> dict[tuple[int, int, int], dict[str, Any]]:
    """Return the blocks in use by device, address and requested size."""
    found = {}
    for segment in segments:
        address, device = segment["address"], segment.get("device", 0)
        for block in segment["blocks"]:
            at = block.get("address", address)
            pending = block["state"] in _PENDING
            if pending or block["state"] == _HELD:
                key = (device, at, block.get("requested_size", block["size"]))
                found[key] = {**block, "stream": segment.get("stream", 0), "pending": pending}
            address += block["size"]
    return found


def _say(
    events: dict[int, list[dict[str, Any]]], action: str, key: tuple[int, int, int], block: dict[str, Any]
) -> None:
    device, address, size = key
    entry = {
        "action": action,
        "addr": address,
        "size": size,
        "stream": block["stream"],
        "frames": block.get("frames") or [],
    }
    events.setdefault(device, []).append(entry)
