"""Write a plan in words: a table for a terminal or Markdown, with a configuration ready to paste."""

from __future__ import annotations

from memprof.config import to_grpo
from memprof.plan.planner import Plan, Row
from memprof.units import format_gib
from memprof.vocabulary import CATEGORY_LABELS, Category

__all__ = ["as_python", "as_yaml", "markdown", "text"]


def _cells(plan: Plan) -> list[tuple[str, ...]]:
    head = ("Method", "Verdict", "Needed GiB", "Allocated GiB", "Host GiB", "Highest in", "Largest")
    rows = [
        (
            row.method,
            "fits" if row.fits else "OOM",
            format_gib(row.device_peak_bytes),
            format_gib(row.peak_bytes),
            format_gib(row.host_bytes),
            row.phase,
            CATEGORY_LABELS[Category(row.largest_category)],
        )
        for row in plan.rows
    ]
    return [head, *rows]


def text(plan: Plan, drawn: str = "") -> str:
    """Write a plan for a terminal; ``drawn`` is the rows as bars."""
    cells = _cells(plan)
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    numbers = {2, 3, 4}
    lines = [f"{plan.model} on {plan.gpu}", ""]
    for row in cells:
        parts = [c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(parts).rstrip())
    return "\n".join([*lines, "", *([drawn] if drawn else []), *_ending(plan), "", *_notes(plan), ""])


def markdown(plan: Plan) -> str:
    """Write a plan for a README or an issue."""
    head, *rows = _cells(plan)
    lines = [f"| {' | '.join(head)} |", "|---|---|--:|--:|--:|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([*lines, "", *_ending(plan, fence=True), "", *_notes(plan), ""])


def _notes(plan: Plan) -> list[str]:
    """Say how far off all of this may be."""
    return [str(plan.to_dict()["expected_error"]["sentence"])]


def _ending(plan: Plan, fence: bool = False) -> list[str]:
    if plan.best is None:
        return ["Nothing tried fits. A smaller model, a larger card, or shorter sequences are left."]
    best = plan.best
    size = best.settings
    how = f"Best found ({best.method}, most {plan.maximized.replace('_', ' ')})"
    if "=" in best.method:  # a value of --vary
        how = f"Largest of these that fits ({best.method})"
    sentence = (
        f"{how}: {size.per_device_train_batch_size} "
        f"completions in a micro-batch of {size.prompt_length} + {size.completion_length} tokens, "
        f"{format_gib(best.device_peak_bytes)} GiB needed."
    )
    code = as_python(best)
    return [sentence, "", *(["```python", code, "```"] if fence else [code])]


def as_python(row: Row) -> str:
    """Write a row as ``GRPOConfig(...)`` and, for an adapter, ``LoraConfig(...)``."""
    return to_grpo.as_python(row.settings)


def as_yaml(row: Row) -> str:
    """Write a row for TRL's command line."""
    return to_grpo.as_yaml(row.settings)
