"""Markdown for issues: tables that stay tables whatever the names."""

from __future__ import annotations

import re

from memprof.reports.markdown.draw import code, text
from memprof.reports.renderers import draw

from tests.reports.document.drawn import render_markdown
from tests.reports.sample import hostile, sample
from tests.reports.test_terminal import same
from tests.reports.typed import build_document, rows_of


def test_snapshot() -> None:
    same("report.md", render_markdown(build_document(*sample())))


def tables(markdown: str) -> list[list[str]]:
    """Lines of each table."""
    blocks = [block.split("\n") for block in markdown.split("\n\n")]
    return [block for block in blocks if block[0].startswith("|")]


def columns(line: str) -> int:
    return len(re.findall(r"(?<!\\)\|", line)) - 1


def test_tables_keep_their_shape() -> None:
    for report, series in (sample(), hostile()):
        found = tables(render_markdown(build_document(report, series)))
        assert len(found) == 3 + bool(report["advice"])
        for lines in found:
            assert len({columns(line) for line in lines}) == 1


def test_hostile_names_are_text() -> None:
    report, series = hostile()
    markdown = render_markdown(build_document(report, series))
    listed = report["peak"]["allocations"]
    markdown += draw("explain", rows_of(listed, sum(a["bytes"] for a in listed)), "markdown")
    outside = re.sub(
        r"(`+)(?!`).*?(?<!`)\1(?!`)", "", re.sub(r"^ *(```+)text$.*?^ *\1$", "", markdown, flags=re.M | re.S)
    )
    assert "<" not in outside.replace("&lt;", "")
    assert not re.search(r"(?<!\\)@everyone", outside)
    assert not re.search(r"(?<!\\)\]\(", outside)
    assert "\x1b" not in markdown


def test_code_spans_hold_anything() -> None:
    assert code("a`b") == "``a`b``"
    assert code("`a") == "`` `a ``"
    assert code("a|b") == "`a\\|b`"


def test_text_is_not_markup() -> None:
    assert text("a_b*c <d> [e](f)") == "a\\_b\\*c &lt;d&gt; \\[e\\](f)"
    assert text("https://x") == "https\\://x"


def test_what_is_guessed_is_counted_in_words() -> None:
    from tests.reports.document.drawn import render_terminal

    document = build_document(sample()[0])
    assert document.summary.guessed is not None
    words = f"Inferred (rows marked ?): {document.summary.guessed.value}  {document.summary.guessed.note}"
    assert words in render_terminal(document, 100)
    assert f"- Inferred (rows marked ?): **{document.summary.guessed.value}** (" in render_markdown(document)
    sure = {**sample()[0], "peak": {**sample()[0]["peak"], "guessed": {}}}
    assert "Guessed" not in render_terminal(build_document(sure), 100) + render_markdown(build_document(sure))
