"""An explained log for people: plain text and Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memprof.units import format_bytes

__all__ = ["render_markdown", "render_text"]

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


def render_text(answer: Mapping[str, Any]) -> str:
    """Plain text, a block for each message."""
    lines: list[str] = []
    for failure in answer["failures"]:
        lines += [_title(failure), *(f"  {line}" for line in _body(failure)), ""]
    lines += [f"Note: {note}" for note in answer["notes"]]
    return "\n".join(lines).rstrip() + "\n"


def _body(failure: Mapping[str, Any]) -> Iterator[str]:
    numbers = failure["numbers"]
    for row in numbers:
        yield f"{row['name']:<14}{format_bytes(row['bytes']):>12}  {row['meaning']}"
    for process in failure["processes"]:
        yield f"{'process ' + str(process['pid']):<14}{format_bytes(process['bytes']):>12}  on the same device"
    if failure["sum"]:
        yield failure["sum"]
    yield f"Cause: {_CAUSES[failure['cause']]}. {_sentence(failure['because'])}"
    if where := _where(failure):
        yield where
    yield "Try, in this order:"
    for i, row in enumerate(failure["try"], 1):
        yield f"  {i}. {row['action']}"
        yield f"     {row['why']}"


def render_markdown(answer: Mapping[str, Any]) -> str:
    """Markdown for an issue or a chat."""
    lines: list[str] = []
    for failure in answer["failures"]:
        lines += [f"### {_safe(_title(failure))}", ""]
        if failure["numbers"]:
            lines += ["| | | |", "|---|---:|---|"]
            lines += [f"| {r['name']} | {format_bytes(r['bytes'])} | {r['meaning']} |" for r in failure["numbers"]]
            lines.append("")
        if failure["sum"]:
            lines += [f"{failure['sum']}.", ""]
        lines += [f"**{_CAUSES[failure['cause']].capitalize()}**: {failure['because']}", ""]
        if where := _where(failure):
            lines += [_safe(where), ""]
        lines += [f"{i}. `{row['action'].replace('`', '')}`: {row['why']}" for i, row in enumerate(failure["try"], 1)]
        lines.append("")
    lines += [f"> {note}" for note in answer["notes"]]
    return "\n".join(lines).rstrip() + "\n"


def _title(failure: Mapping[str, Any]) -> str:
    who = f"rank {failure['rank']}, " if failure["rank"] is not None else ""
    where = f"{failure['backend']} {failure['device']}" if failure["device"] is not None else failure["backend"]
    title = f"{who}{where or failure['kind']}"
    asked = failure["requested_bytes"]
    what = f"{format_bytes(asked)} did not fit" if asked is not None else "out of memory"
    missing = failure["missing_bytes"]
    short = f", {format_bytes(missing)} missing" if missing else ""
    return f"{title} (line {failure['line']}): {what}{short}"


def _where(failure: Mapping[str, Any]) -> str | None:
    frame = "".join(c if c.isprintable() else "?" for c in failure["frame"] or "")
    if failure["phase"] and frame:
        return f"It was in {failure['phase']}, called from {frame}."
    if failure["phase"]:
        return f"It was in {failure['phase']}."
    return f"It was called from {frame}." if frame else None


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _safe(text: str) -> str:
    return "".join(f"\\{c}" if c in "<>[]*_`|" else c for c in text)
