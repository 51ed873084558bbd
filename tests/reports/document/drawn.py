"""Draw a report as commands print it."""

from __future__ import annotations

from memprof.reports.document.model import Document
from memprof.reports.renderers import draw


def render_markdown(document: Document) -> str:
    return draw("report", document, "markdown")


def render_terminal(document: Document, width: int = 100, colour: bool = False) -> str:
    return draw("report", document, "text", width, colour)
