"""The renderers: what each kind of answer shows, and what draws it in which format.

To add an answer, write ``answers/<answer>.py`` and name its function in :data:`ANSWERS`: every format draws it. A kind
with a page of its own is in :data:`PAGES` too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memprof.report.base import Model

FORMATS = ("text", "json", "markdown", "html")

# kind of answer -> module:function below this package: from a document to a sheet of blocks.
ANSWERS: dict[str, str] = {
    "report": "answers.report:report",
    "report_and_changes": "answers.report:report_and_changes",
    "short_report": "answers.report:short_report",
    "simulate": "answers.report:report",
    "advise": "answers.advice:advice",
    "compare": "answers.compare:comparison",
    "explain": "answers.explain:explained",
    "plan": "answers.plan:plan",
    "serving": "answers.serving:serving",
    "oom": "answers.oom:failures",
    "watch": "answers.watch:counters",
}
_REPORT = "html.report:render_html"
# kind of answer -> module:function below this package: from a document to a page.
PAGES: dict[str, str] = {
    "report": _REPORT,
    "report_and_changes": _REPORT,
    "simulate": _REPORT,
    "advise": _REPORT,
    "compare": "html.compare:render_comparison",
    "plan": "html.plan:render_plan",
}


@dataclass(frozen=True)
class Answer:
    """What a command found.

    ``data`` is the answer itself, as its JSON has it. ``document`` makes what the other renderers read, and ``page``
    what the HTML page reads if a page shows more; neither is called if only JSON is asked for. ``caption`` is printed
    on standard error above text and Markdown.
    """

    kind: str
    data: Model | Mapping[str, object]
    document: Callable[[], Any]
    page: Callable[[], Any] | None = None
    caption: str = ""


def formats_of(kind: str) -> tuple[str, ...]:
    """Return the formats a kind of answer can be rendered in."""
    return tuple(name for name in FORMATS if name != "html" or kind in PAGES)


def render(answer: Answer, style: str, width: int = 100, colour: bool = False) -> str:
    """Render an answer; ``width`` and ``colour`` matter to text only. JSON is the answer itself."""
    if style == "json":
        from memprof.report.codec import dumps, to_json

        return dumps(answer.data) if isinstance(answer.data, Mapping) else to_json(answer.data)
    if style == "html" and answer.page is not None:
        return draw(answer.kind, answer.page(), style)
    return draw(answer.kind, answer.document(), style, width, colour)


def draw(kind: str, document: Any, style: str = "text", width: int = 100, colour: bool = False) -> str:
    """Draw a kind of answer's document.

    Raises:
        KeyError: there is no such kind, or it has no page.
        ValueError: there is no such style.
    """
    if style == "html":
        page: str = _function(PAGES[kind])(document)
        return page
    sheet = _function(ANSWERS[kind])(document)
    if style == "markdown":
        from memprof.reports.markdown.draw import draw as draw_markdown

        return draw_markdown(sheet)
    if style != "text":
        raise ValueError(f"no drawing function for {style}")
    from memprof.reports.terminal.draw import draw as draw_text

    return draw_text(sheet, width, colour)


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"memprof.reports.{module}"), function)
    return found
