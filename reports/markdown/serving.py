"""Render the plan of a serving engine as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memprof.reports.markdown.elements import table, text
from memprof.reports.terminal.serving import serving_rows

__all__ = ["render_serving"]


def render_serving(plan: Mapping[str, Any]) -> str:
    """Render the settings, what the share holds, and notes."""
    rows = [[f"`{name}`", value, text(meaning)] for name, value, meaning in serving_rows(plan)]
    notes = "\n".join(f"- {text(note)}" for note in plan["notes"])
    head = f"### {text(plan['model'])}: vLLM beside the trainer (modelled)"
    return f"{head}\n\n{table(['Setting or part', '', 'What'], 'lrl', rows)}\n\n{notes}\n"
