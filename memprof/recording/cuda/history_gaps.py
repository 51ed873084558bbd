"""Close the gaps in a thinned history by what is seen to have changed across them."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Gap", "block_changes", "fill_gaps"]

_LIVE = "active_allocated"


class Gap(NamedTuple):
    """A stretch that was not recorded, and the events that lead from the state before it to the one after."""

    begin_us: int
    end_us: int
    events: list[dict[str, Any]]


def block_changes(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Frees of blocks that are gone and allocations of new ones, as trace entries without times.

    A block is known by address and requested size; one that was freed and came back alike is taken for the same.
    """
    old, new = _live_blocks(before), _live_blocks(after)
    events = []
    for key in old.keys() - new.keys():
        events += [_event("free_requested", key, old[key]), _event("free_completed", key, old[key])]
    for key in new.keys() - old.keys():
        events.append(_event("alloc", key, new[key]))
    return events


def fill_gaps(trace: list[dict[str, Any]], gaps: list[Gap]) -> list[dict[str, Any]]:
    """Return the trace with each gap's events at the gap's end; ``gaps`` in order of time."""
    out: list[dict[str, Any]] = []
    position = 0
    for gap in gaps:
        start = position
        while position < len(trace) and trace[position].get("time_us", 0) <= gap.end_us:
            position += 1
        out += trace[start:position]
        out += [{**event, "time_us": gap.end_us} for event in gap.events]
    return out + trace[position:]


def _live_blocks(segments: list[dict[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
    found = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            at = block.get("address", address)
            if block["state"] == _LIVE:
                found[at, block.get("requested_size", block["size"])] = {**block, "stream": segment.get("stream", 0)}
            address += block["size"]
    return found


def _event(action: str, key: tuple[int, int], block: dict[str, Any]) -> dict[str, Any]:
    return {
        "action": action,
        "addr": key[0],
        "size": key[1],
        "stream": block["stream"],
        "frames": block.get("frames") or [],
    }
