"""Name the parts of an explained out-of-memory text in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memprof.units import format_bytes

__all__ = ["cause_words", "process_rows", "sentence", "title_of", "where_of"]

_CAUSES = {
    "full": "the device is full",
    "fragmentation": "fragmentation",
    "other_processes": "other processes on the device",
    "unexplained": "memory nobody is named for",
    "outside_torch": "memory outside torch",
    "larger_than_device": "one tensor larger than the device",
    "limit": "a limit set for this process",
    "refused": "refused although there was room",
    "driver": "the driver had nothing left",
    "library": "a library had nothing left",
    "cpu": "host memory",
    "host": "host memory",
    "killed": "killed from outside",
    "engine": "the inference engine",
    "unknown": "no numbers to go by",
}
_MOST_LISTED = 8
_LOWER_NAMES = ("torch", "bitsandbytes", "vLLM")


def cause_words(failure: Mapping[str, Any]) -> str:
    """Name the cause of a failure."""
    return _CAUSES[failure["cause"]]


def title_of(failure: Mapping[str, Any]) -> str:
    """Say who ran out of memory where in the log, and how much was missing."""
    who = _who(failure)
    if failure["kind"] != "device":
        asked = failure["requested_bytes"]
        size = f": {format_bytes(asked)} did not fit" if asked is not None else ""
        program = failure["program"]
        program = sentence(program) if program.startswith("the ") else program
        return f"{who}{program} (line {failure['line']}){size}"
    where = f"{failure['backend']} {failure['device']}" if failure["device"] is not None else failure["backend"]
    title = f"{who}{where or failure['kind']}"
    asked = failure["requested_bytes"]
    what = f"{format_bytes(asked)} did not fit" if asked is not None else "out of memory"
    missing = failure["missing_bytes"]
    short = f", {format_bytes(missing)} missing" if missing else ""
    return f"{title} (line {failure['line']}): {what}{short}"


def _who(failure: Mapping[str, Any]) -> str:
    """Name the rank whose figures these are, and the others of the event."""
    if failure["rank"] is None:
        return ""
    others = [str(row["rank"]) for row in failure["ranks"][1:]]
    if not others:
        return f"rank {failure['rank']}, "
    more = f" and {len(others) - _MOST_LISTED} more" if len(others) > _MOST_LISTED else ""
    likewise = f"rank{'s' if len(others) > 1 else ''} {', '.join(others[:_MOST_LISTED])}{more}"
    return f"rank {failure['rank']} (likewise {likewise}), "


def where_of(failure: Mapping[str, Any]) -> str | None:
    """Say in which phase and from which frame memory was asked for; None where neither is known."""
    frame = failure["frame"] or ""
    wide = " It makes logits: a tensor as wide as the vocabulary." if failure["logits"] else ""
    if failure["phase"] and frame:
        return f"It was in {failure['phase']}, called from {frame}.{wide}"
    if failure["phase"]:
        return f"It was in {failure['phase']}.{wide}"
    return f"It was called from {frame}.{wide}" if frame else None


def process_rows(failure: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield name, size and meaning of the listed processes, the rest of many in one row."""
    processes = failure["processes"]
    for process in processes[:_MOST_LISTED]:
        held = format_bytes(process["bytes"]) if process["bytes"] else "not told"
        yield f"process {process['pid']}", held, "on the same device"
    if len(processes) > _MOST_LISTED:
        yield f"{len(processes) - _MOST_LISTED} more", "", "processes on the same device"


def sentence(text: str) -> str:
    """Begin a sentence with a capital, unless it begins with a name in lower case."""
    return text if text.startswith(_LOWER_NAMES) else text[:1].upper() + text[1:]
