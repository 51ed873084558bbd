"""Draw explained out-of-memory texts for a terminal: plain text that fits 80 columns, a block for each failure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from memprof.units import format_bytes

__all__ = ["render_failures"]

_WIDTH = 79
_MOST_LISTED = 8


def render_failures(answer: Mapping[str, Any], width: int = 80, colour: bool = False) -> str:
    """Render every failure: its numbers, its cause and what to try."""
    lines: list[str] = []
    for failure in answer["failures"]:
        lines += [*_filled(failure["headline"]["verdict"], "", "  "), *_body(failure), ""]
    for note in answer["notes"]:
        lines += _filled(f"Note: {note}", "", "  ")
    return "\n".join(lines).rstrip() + "\n"


def _body(failure: Mapping[str, Any]) -> Iterator[str]:
    yield from _filled(failure["headline"]["cause"], "  ", "    ")
    for row in failure["numbers"]:
        yield from _row(row["name"], format_bytes(row["bytes"]), row["meaning"])
    for name, size, meaning in _processes(failure):
        yield from _row(name, size, meaning)
    if failure["sum"]:
        yield f"  {failure['sum']}"
    for contradiction in failure["contradictions"]:
        yield from _filled(f"Contradiction: {contradiction}.", "  ", "    ")
    yield "  Try, in this order:"
    for i, row in enumerate(failure["try"], 1):
        yield from _filled(f"{i}. {row['action']}", "    ", "       ")
        yield from _filled(row["why"], "       ", "       ")


def _processes(failure: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield name, size and meaning of the listed processes, the rest of many in one row."""
    processes = failure["processes"]
    for process in processes[:_MOST_LISTED]:
        held = format_bytes(process["bytes"]) if process["bytes"] else "not told"
        yield f"process {process['pid']}", held, "on the same device"
    if len(processes) > _MOST_LISTED:
        yield f"{len(processes) - _MOST_LISTED} more", "", "processes on the same device"


def _row(name: str, size: str, meaning: str) -> list[str]:
    return _filled(meaning, f"  {name:<14}{size:>12}  ", " " * 30)


def _filled(text: str, first: str, then: str) -> list[str]:
    return textwrap.wrap(
        "".join(c if c.isprintable() else "?" for c in text),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=then,
        break_long_words=False,
        break_on_hyphens=False,
    )
