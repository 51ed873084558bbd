"""Print a report: whole, or what a training run ends with."""

from __future__ import annotations

import sys
from typing import TextIO

from memprof.reports.document.model import Document
from memprof.reports.renderers import draw
from memprof.reports.terminal.screen import abilities, write_to


def print_document(document: Document, stream: TextIO | None = None) -> None:
    """Print a report to ``stream`` (standard output) in its width, its colours and its characters."""
    stream = stream or sys.stdout
    write_to(stream, draw("report", document, "text", *abilities(stream)))


def render_short(document: Document) -> str:
    """Render the peak, its bar and the rows, as wide as standard output: what a training run ends with."""
    return draw("short_report", document, "text", *abilities(sys.stdout))
