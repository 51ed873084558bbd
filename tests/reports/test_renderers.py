"""The registry: every line of it loads, every answer is on it, JSON needs no document."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest
from memprof.reports.html.report import render_html
from memprof.reports.notebook import document_fragment
from memprof.reports.renderers import ANSWERS, FORMATS, PAGES, Answer, draw, formats_of, render

from memprof.report.report import Explanation
from tests.reports.document.drawn import render_markdown, render_terminal
from tests.reports.sample import sample
from tests.reports.typed import build_document

REPORTS = Path(__file__).resolve().parents[2] / "reports"


@pytest.mark.parametrize("kind", ANSWERS)
def test_every_answer_and_every_page_is_a_function_of_its_document(kind: str) -> None:
    for name in filter(None, (ANSWERS[kind], PAGES.get(kind))):
        module, _, function = name.partition(":")
        inspect.signature(getattr(import_module(f"memprof.reports.{module}"), function)).bind(object())


def test_every_answer_is_registered() -> None:
    registered = {name.removeprefix("answers.").split(":")[0] for name in ANSWERS.values()}
    assert {path.stem for path in (REPORTS / "answers").glob("*.py")} - {"__init__"} == registered


def test_every_kind_has_all_formats_but_a_page() -> None:
    for kind in ANSWERS:
        assert set(formats_of(kind)) == set(FORMATS).difference(() if kind in PAGES else ("html",))
    with pytest.raises(KeyError):
        draw("watch", [], "html")


def test_json_asks_for_no_document_and_a_page_for_its_own() -> None:
    def never() -> None:
        raise AssertionError

    answer = Answer("explain", Explanation(allocations=()), never)
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
        assert form == "html" or "Inferred (rows marked ?)" in table
