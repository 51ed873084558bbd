"""Name the parts of an explained out-of-memory message in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memprof.units import format_bytes

__all__ = ["cause_words", "first_capital", "title_of", "where_of"]

_CAUSES = {
    "full": "the device is full",
    "fragmentation": "fragmentation",
    "other_processes": "other processes on the device",
    "outside_torch": "memory outside torch",
    "larger_than_device": "one tensor larger than the device",
    "limit": "a limit set for this process",
    "refused": "refused although there was room",
    "driver": "the driver had nothing left",
    "library": "a CUDA library had nothing left",
    "cpu": "host memory",
    "host": "host memory",
    "killed": "killed from outside",
    "engine": "the inference engine had too little",
    "unknown": "no numbers to go by",
}


def cause_words(failure: Mapping[str, Any]) -> str:
    """Name the cause of a failure."""
    return _CAUSES[failure["cause"]]


def title_of(failure: Mapping[str, Any]) -> str:
    """Say who ran out of memory where in the log, and how much was missing."""
    who = f"rank {failure['rank']}, " if failure["rank"] is not None else ""
    where = f"{failure['backend']} {failure['device']}" if failure["device"] is not None else failure["backend"]
    title = f"{who}{where or failure['kind']}"
    asked = failure["requested_bytes"]
    what = f"{format_bytes(asked)} did not fit" if asked is not None else "out of memory"
    missing = failure["missing_bytes"]
    short = f", {format_bytes(missing)} missing" if missing else ""
    return f"{title} (line {failure['line']}): {what}{short}"


def where_of(failure: Mapping[str, Any]) -> str | None:
    """Say in which phase and from which frame memory was asked for; None where neither is known."""
    frame = "".join(c if c.isprintable() else "?" for c in failure["frame"] or "")
    if failure["phase"] and frame:
        return f"It was in {failure['phase']}, called from {frame}."
    if failure["phase"]:
        return f"It was in {failure['phase']}."
    return f"It was called from {frame}." if frame else None


def first_capital(text: str) -> str:
    """Begin a sentence with a capital."""
    return text[:1].upper() + text[1:]
