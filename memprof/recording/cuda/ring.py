"""Tell how much of a device's history its trace holds, from the trace itself and what was in use before it."""

from __future__ import annotations

from typing import Any

from memprof.recording.recorder import DeviceHistory
from memprof.vocabulary import History

#: States of blocks that are not free.
ACTIVE = ("active_allocated", "active_pending_free", "active_awaiting_free")


def history_of(
    raw: dict[str, Any], device: int, *, start_us: int, in_use: set[int], max_entries: int | None, made: int
) -> DeviceHistory:
    """Return how much of a device's history its trace in a snapshot holds.

    Args:
        raw: the snapshot, as torch returns it.
        device: whose trace.
        start_us: when memprof began to record.
        in_use: addresses of the device's blocks that were in use then.
        max_entries: how many events torch keeps for each device; None for a history that somebody else has switched on.
        made: allocations that torch has counted on the device since then; only asked for somebody else's history.
    """
    traces = raw.get("device_traces") or []
    trace: list[dict[str, Any]] = traces[device] if device < len(traces) else []
    oldest = trace[0].get("time_us", start_us) if trace else start_us
    full = max_entries is not None and len(trace) >= max_entries
    if full or (max_entries is None and _lost(raw, trace, device, start_us, in_use, made)):
        return DeviceHistory(device, max(start_us, oldest), History.TRUNCATED)
    return DeviceHistory(device, start_us, History.STARTED_LATE if in_use else History.COMPLETE)


def _lost(
    raw: dict[str, Any], trace: list[dict[str, Any]], device: int, start_us: int, in_use: set[int], made: int
) -> bool:
    """Tell whether a history of unknown length has lost events since ``start_us``.

    It has if it does not lead from the blocks in use at the start to those in use at the end, or if torch has counted
    more allocations than it shows, as after a loop whose blocks have all been freed again.
    """
    if trace and trace[0].get("time_us", start_us) <= start_us:
        return False  # it reaches back further
    known, seen = set(in_use), 0
    for entry in trace:
        if entry["action"] == "alloc":
            known.add(entry["addr"])
            seen += 1
        elif entry["action"] == "free_completed":
            if entry["addr"] not in known:
                return True
            known.discard(entry["addr"])
    left = blocks_in_use(raw.get("segments") or []).get(device, set())
    return left != known or seen < made


def blocks_in_use(segments: list[dict[str, Any]]) -> dict[int, set[int]]:
    """Return by device the addresses of the blocks that are not free."""
    found: dict[int, set[int]] = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] in ACTIVE:
                found.setdefault(segment.get("device", 0), set()).add(block.get("address", address))
            address += block["size"]
    return found


def copied(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a copy that shares nothing with a snapshot. What events share in it, such as stacks, they share in the
    copy."""
    copies: dict[int, Any] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, (dict, list)):
            return value
        made = copies.get(id(value))
        if made is None:
            made = copies[id(value)] = (
                {name: copy(inner) for name, inner in value.items()}
                if isinstance(value, dict)
                else [copy(inner) for inner in value]
            )
        return made

    return {name: copy(value) for name, value in raw.items()}
