"""Draw explained out-of-memory messages for a terminal: plain text, a block for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memprof.reports.document.oom import cause_words, first_capital, title_of, where_of

from memprof.units import format_bytes

__all__ = ["render_failures"]


def render_failures(answer: Mapping[str, Any], width: int = 80, colour: bool = False) -> str:
    """Render every failure: its numbers, its cause and what to try."""
    lines: list[str] = []
    for failure in answer["failures"]:
        lines += [title_of(failure), *(f"  {line}" for line in _body(failure)), ""]
    lines += [f"Note: {note}" for note in answer["notes"]]
    return "\n".join(lines).rstrip() + "\n"


def _body(failure: Mapping[str, Any]) -> Iterator[str]:
    for row in failure["numbers"]:
        yield f"{row['name']:<14}{format_bytes(row['bytes']):>12}  {row['meaning']}"
    for process in failure["processes"]:
        yield f"{'process ' + str(process['pid']):<14}{format_bytes(process['bytes']):>12}  on the same device"
    if failure["sum"]:
        yield failure["sum"]
    yield f"Cause: {cause_words(failure)}. {first_capital(failure['because'])}"
    if where := where_of(failure):
        yield where
    yield "Try, in this order:"
    for i, row in enumerate(failure["try"], 1):
        yield f"  {i}. {row['action']}"
        yield f"     {row['why']}"
