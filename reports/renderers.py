"""The renderers: which function draws which kind of answer in which format.

To add one, write ``<format>/<answer>.py`` and name its function in :data:`RENDERERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

__all__ = ["FORMATS", "RENDERERS", "Answer", "formats_of", "render", "renderer"]

FORMATS = ("text", "json", "markdown", "html")

_REPORT = {"text": "terminal.report:render_terminal", "markdown": "markdown.report:render_markdown"}
_PAGE = "html.report:render_html"

# kind of answer -> format -> module:function below this package. JSON is the answer itself, the same for every kind.
RENDERERS: dict[str, dict[str, str]] = {
    "report": {**_REPORT, "html": _PAGE},
    "report_and_changes": {**_REPORT, "text": "terminal.advice:render_report_and_changes", "html": _PAGE},
    "simulate": {**_REPORT, "html": _PAGE},
    "advise": {"text": "terminal.advice:render_advice", "markdown": "markdown.advice:render_advice", "html": _PAGE},
    "compare": {
        "text": "terminal.compare:render_comparison",
        "markdown": "markdown.compare:render_comparison",
        "html": "html.compare:render_comparison",
    },
    "explain": {"text": "terminal.explain:render_allocations", "markdown": "markdown.explain:render_allocations"},
    "plan": {
        "text": "terminal.plan:render_plan",
        "markdown": "markdown.plan:render_plan",
        "html": "html.plan:render_plan",
    },
    "serving": {"text": "terminal.serving:render_serving", "markdown": "markdown.serving:render_serving"},
    "oom": {"text": "terminal.oom:render_failures", "markdown": "markdown.oom:render_failures"},
    "watch": {"text": "terminal.watch:render_counters"},
}


@dataclass(frozen=True)
class Answer:
    """What a command found.

    ``data`` is its JSON. ``document`` makes what the other renderers read, and ``page`` what the HTML page reads where
    a page shows more; neither is called when JSON is all that is asked for. ``caption`` stands on standard error above
    printed text and Markdown.
    """

    kind: str
    data: dict[str, Any]
    document: Callable[[], Any]
    page: Callable[[], Any] | None = None
    caption: str = ""


def formats_of(kind: str) -> tuple[str, ...]:
    """Return the formats a kind of answer can be rendered in."""
    return tuple(name for name in FORMATS if name == "json" or name in RENDERERS[kind])


def renderer(kind: str, style: str) -> Callable[..., str]:
    """Load the function that renders a kind of answer in a format.

    Text takes ``(document, width, colour)``, Markdown and HTML ``(document)``, JSON the plain data.

    Raises:
        KeyError: there is none.
    """
    name = "json:dumps" if style == "json" else RENDERERS[kind][style]
    module, _, function = name.partition(":")
    found: Callable[..., str] = getattr(import_module(f"memprof.reports.{module}"), function)
    return found


def render(answer: Answer, style: str, width: int = 100, colour: bool = False) -> str:
    """Render an answer; ``width`` and ``colour`` matter to text only."""
    draw = renderer(answer.kind, style)
    if style == "json":
        return draw(answer.data)
    if style == "text":
        return draw(answer.document(), width, colour)
    if style == "html" and answer.page is not None:
        return draw(answer.page())
    return draw(answer.document())
