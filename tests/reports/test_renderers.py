"""The registry: every line of it loads, every renderer is on it, JSON needs no document."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from memprof.reports.document.build import build_document
from memprof.reports.html.report import render_html
from memprof.reports.markdown.report import render_markdown
from memprof.reports.notebook import document_fragment
from memprof.reports.renderers import FORMATS, RENDERERS, Answer, formats_of, render, renderer
from memprof.reports.terminal.report import render_terminal

from tests.reports.sample import sample

REPORTS = Path(__file__).resolve().parents[2] / "reports"
# Files that several renderers share.
SHARED = {
    "html": {"advice", "charts", "elements", "evidence", "interactive_timeline", "opened", "page", "ranks",
             "static_timeline", "summary", "tables"},
    "markdown": {"elements"},
    "terminal": {"elements", "largest", "room", "screen"},
}  # fmt: skip
ENTRIES = [(kind, style) for kind, styles in RENDERERS.items() for style in styles]


@pytest.mark.parametrize(("kind", "style"), ENTRIES, ids=str)
def test_every_entry_can_be_called_as_render_calls_it(kind: str, style: str) -> None:
    function = renderer(kind, style)
    size = (80, False) if style == "text" else ()
    inspect.signature(function).bind(object(), *size)
    assert function.__name__.startswith("render_")


@pytest.mark.parametrize("room", sorted(SHARED))
def test_every_file_of_a_format_is_registered_or_shared(room: str) -> None:
    names = {name for styles in RENDERERS.values() for name in styles.values() if name.startswith(f"{room}.")}
    registered = {name.removeprefix(f"{room}.").split(":")[0] for name in names}
    files = {path.stem for path in (REPORTS / room).glob("*.py")} - {"__init__"}
    assert files == registered | SHARED[room]


def test_every_kind_has_text_and_json() -> None:
    assert all({"text", "json"} <= set(formats_of(kind)) <= set(FORMATS) for kind in RENDERERS)
    with pytest.raises(KeyError):
        renderer("watch", "html")


def test_json_asks_for_no_document_and_a_page_for_its_own() -> None:
    def never() -> None:
        raise AssertionError

    answer = Answer("explain", {"schema": "memprof.explain/1", "allocations": []}, never)
    assert render(answer, "json") == '{\n "schema": "memprof.explain/1",\n "allocations": []\n}\n'
    with pytest.raises(AssertionError):
        render(answer, "text")
    with pytest.raises(RuntimeError, match="the page's"):
        render(Answer("report", {}, never, _raise), "html")


def _raise() -> None:
    raise RuntimeError("the page's own document")


def test_a_guessed_row_looks_guessed_in_every_form() -> None:
    """The sample's rows that are guessed, and they alone, carry the mark wherever rows are drawn."""
    document = build_document(sample()[0])
    rows = [child for row in document.rows for child in row.children if child.at_peak]
    marked = {row.label for row in rows if row.marked != row.label}
    assert 0 < len(marked) < len(rows)
    page = re.search(r'<section id="components".*?</section>', render_html(document), re.DOTALL)
    assert page is not None
    tables = {"terminal": render_terminal(document, 100), "markdown": render_markdown(document),
              "notebook": document_fragment(document), "html": page[0]}  # fmt: skip
    for form, table in tables.items():
        words = re.sub(r"<[^>]*>|&nbsp;", "\n", table)
        found = {row.label for row in rows if re.search(rf"^(  \w |\W*){row.label} \?(\s|$)", words, re.MULTILINE)}
        assert found == marked, form
        assert form == "html" or "Guessed (rows marked ?)" in table
