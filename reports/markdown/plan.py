"""Render a plan as Markdown, for a README or an issue."""

from __future__ import annotations

from memprof.reports.document.plan import PlanDocument

__all__ = ["render_plan"]


def render_plan(plan: PlanDocument) -> str:
    """Render the table, the best configuration in a fence and how far off the figures may be."""
    head, *rows = plan.cells()
    ruler = "|---|---|--:|--:|--:|---|---|" + "--:|" * (len(head) - 7)
    lines = [f"| {' | '.join(head)} |", ruler, *(f"| {' | '.join(row)} |" for row in rows)]
    lines += ["", plan.best_sentence]
    lines += ["", "```python", plan.code, "```"] if plan.code else []
    lines += ["", plan.error, ""]
    return "\n".join(lines) + (f"\n{plan.yaml}" if plan.yaml else "")
