"""An explained text for people: plain text that fits 80 columns, and Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from memprof.units import format_bytes

__all__ = ["render_markdown", "render_text"]

_WIDTH = 79
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


def render_text(answer: Mapping[str, Any]) -> str:
    """Return plain text, a block for each failure."""
    lines: list[str] = []
    for failure in answer["failures"]:
        lines += [*_filled(_title(failure), "", "  "), *_body(failure), ""]
    for note in answer["notes"]:
        lines += _filled(f"Note: {note}", "", "  ")
    return "\n".join(lines).rstrip() + "\n"


def _body(failure: Mapping[str, Any]) -> Iterator[str]:
    for row in failure["numbers"]:
        yield from _row(row["name"], format_bytes(row["bytes"]), row["meaning"])
    for name, size, meaning in _process_rows(failure):
        yield from _row(name, size, meaning)
    if failure["sum"]:
        yield f"  {failure['sum']}"
    for contradiction in failure["contradictions"]:
        yield from _filled(f"Contradiction: {contradiction}.", "  ", "    ")
    yield from _filled(f"Cause: {_CAUSES[failure['cause']]}. {_sentence(failure['because'])}", "  ", "    ")
    if where := _where(failure):
        yield from _filled(where, "  ", "    ")
    yield "  Try, in this order:"
    for i, row in enumerate(failure["try"], 1):
        yield from _filled(f"{i}. {row['action']}", "    ", "       ")
        yield from _filled(row["why"], "       ", "       ")


def _row(name: str, size: str, meaning: str) -> list[str]:
    return _filled(meaning, f"  {name:<14}{size:>12}  ", " " * 30)


def _process_rows(failure: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    processes = failure["processes"]
    for process in processes[:_MOST_LISTED]:
        held = format_bytes(process["bytes"]) if process["bytes"] else "not told"
        yield f"process {process['pid']}", held, "on the same device"
    if len(processes) > _MOST_LISTED:
        yield f"{len(processes) - _MOST_LISTED} more", "", "processes on the same device"


def _filled(text: str, first: str, then: str) -> list[str]:
    return textwrap.wrap(
        "".join(c if c.isprintable() else "?" for c in text),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=then,
        break_long_words=False,
        break_on_hyphens=False,
    )


def render_markdown(answer: Mapping[str, Any]) -> str:
    """Return Markdown for an issue or a chat."""
    lines: list[str] = []
    for failure in answer["failures"]:
        lines += [f"### {_safe(_title(failure))}", ""]
        if failure["numbers"]:
            lines += ["| | | |", "|---|---:|---|"]
            lines += [f"| {r['name']} | {format_bytes(r['bytes'])} | {r['meaning']} |" for r in failure["numbers"]]
            lines.append("")
        if failure["sum"]:
            lines += [f"{failure['sum']}.", ""]
        lines += [f"Contradiction: {_safe(text)}.\n" for text in failure["contradictions"]]
        lines += [f"**{_sentence(_CAUSES[failure['cause']])}**: {_safe(failure['because'])}", ""]
        if where := _where(failure):
            lines += [_safe(where), ""]
        lines += [f"{i}. `{row['action'].replace('`', '')}`: {row['why']}" for i, row in enumerate(failure["try"], 1)]
        lines.append("")
    lines += [f"> {_safe(note)}" for note in answer["notes"]]
    return "\n".join(lines).rstrip() + "\n"


def _title(failure: Mapping[str, Any]) -> str:
    who = f"rank {failure['rank']}, " if failure["rank"] is not None else ""
    if failure["kind"] != "device":
        asked = failure["requested_bytes"]
        size = f": {format_bytes(asked)} did not fit" if asked is not None else ""
        program = failure["program"]
        program = _sentence(program) if program.startswith("the ") else program
        return f"{who}{program} (line {failure['line']}){size}"
    where = f"{failure['backend']} {failure['device']}" if failure["device"] is not None else failure["backend"]
    title = f"{who}{where or failure['kind']}"
    asked = failure["requested_bytes"]
    what = f"{format_bytes(asked)} did not fit" if asked is not None else "out of memory"
    missing = failure["missing_bytes"]
    short = f", {format_bytes(missing)} missing" if missing else ""
    return f"{title} (line {failure['line']}): {what}{short}"


def _where(failure: Mapping[str, Any]) -> str | None:
    frame = failure["frame"] or ""
    wide = " It makes logits: a tensor as wide as the vocabulary." if failure["logits"] else ""
    if failure["phase"] and frame:
        return f"It was in {failure['phase']}, called from {frame}.{wide}"
    if failure["phase"]:
        return f"It was in {failure['phase']}.{wide}"
    return f"It was called from {frame}.{wide}" if frame else None


def _sentence(text: str) -> str:
    return text if text.startswith(_LOWER_NAMES) else text[:1].upper() + text[1:]


def _safe(text: str) -> str:
    return "".join(f"\\{c}" if c in "<>[]*_`|" else c for c in text if c.isprintable())
