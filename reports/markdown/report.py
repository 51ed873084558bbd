"""Render a report as GitHub Markdown, for issues and pull requests."""

from __future__ import annotations

from memprof.reports.document.model import Document
from memprof.reports.renderers import draw


def render_markdown(document: Document) -> str:
    """Render title and peak, then rows, phases and the largest allocations as tables, and notes at the end."""
    return draw("report", document, "markdown")
