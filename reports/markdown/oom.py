"""Render explained out-of-memory texts as Markdown, for an issue or a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memprof.units import format_bytes

__all__ = ["render_failures"]


def render_failures(answer: Mapping[str, Any]) -> str:
    """Render every failure: its numbers as a table, its cause and what to try."""
    lines: list[str] = []
    for failure in answer["failures"]:
        headline = failure["headline"]
        lines += [f"### {_safe(headline['verdict'])}", "", _safe(headline["cause"]), ""]
        if failure["numbers"]:
            lines += ["| | | |", "|---|---:|---|"]
            lines += [f"| {r['name']} | {format_bytes(r['bytes'])} | {r['meaning']} |" for r in failure["numbers"]]
            lines.append("")
        if failure["sum"]:
            lines += [f"{failure['sum']}.", ""]
        lines += [f"Contradiction: {_safe(text)}.\n" for text in failure["contradictions"]]
        lines += [f"{i}. `{row['action'].replace('`', '')}`: {row['why']}" for i, row in enumerate(failure["try"], 1)]
        lines.append("")
    lines += [f"> {_safe(note)}" for note in answer["notes"]]
    return "\n".join(lines).rstrip() + "\n"


def _safe(text: str) -> str:
    return "".join(f"\\{c}" if c in "<>[]*_`|" else c for c in text if c.isprintable())
