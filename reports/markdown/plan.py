"""Render a plan as Markdown, for a README or an issue."""

from __future__ import annotations

from memprof.reports.document.plan import PlanDocument
from memprof.reports.markdown.elements import headline

__all__ = ["render_plan"]


_WORDS = ("Method", "Verdict", "Highest in", "Largest")


def render_plan(plan: PlanDocument) -> str:
    """Render the headline, the table, the settings in a fence, the notes and how far off the figures may be."""
    head, *rows = plan.cells()
    ruler = "|" + "|".join("---" if name in _WORDS else "--:" for name in head) + "|"
    lines = [headline(plan.headline), "", f"| {' | '.join(head)} |", ruler]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    lines += ["", "\\* no other row both takes less time (estimated) and needs less memory"] if plan.timed else []
    lines += ["", "```python", plan.code, "```"] if plan.code else []
    lines += ["", plan.fastest_sentence]
    lines += ["", "```python", plan.fastest_code, "```"] if plan.fastest_code else []
    lines += ["", *(f"- {note}" for note in plan.notes)] if plan.notes else []
    lines += ["", plan.error, ""]
    return "\n".join(lines) + (f"\n{plan.yaml}" if plan.yaml else "")


def _cell(words: str) -> str:
    return words.strip().replace("*", "\\*")
