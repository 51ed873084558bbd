"""What is shown of a plan: a table and bars for a terminal, Markdown, a page. MEMPROF_UPDATE_SNAPSHOTS=1 rewrites what
is expected; then look at the difference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from memprof.reports.document.plan import PlanDocument, build_plan
from memprof.reports.html.plan import render_plan as render_page
from memprof.reports.json import validate
from memprof.reports.markdown.plan import render_plan as render_markdown
from memprof.reports.terminal.plan import render_bars, render_plan

from memprof.config.settings import Settings
from tests.reports.html.browser import CHROMIUM, chromium, open_page, violations
from tests.reports.html.test_html import packed
from tests.reports.test_terminal import same

GIB = 2**30
CODE = "args = GRPOConfig(\n    num_generations=4,\n)"


def sample_plan(**changes: Any) -> PlanDocument:
    """A method that does not fit 24 GiB, one that does, and the settings of that one."""
    rows = [_row("full", 30, 27, fits=False), _row("<lora>", 20, 18, fits=True)]
    data: dict[str, Any] = {
        "schema": "memprof.plan/1", "model": "org/<b>model", "gpu": "24GB", "rows": rows, "best": rows[1],
        "maximized": "context", "total_bytes": 24 * GIB, "limit_bytes": 23 * GIB,
        "expected_error": {
            "sentence": "Expected error, from 2 comparisons.", "not_compared": [],
            "allocated": {"low": -0.1, "high": 0.1, "comparisons": 1},
            "reserved": {"low": -0.1, "high": 0.1, "comparisons": 1},
        },
        "notes": ["full does not fit."], "code": CODE,
    }  # fmt: skip
    return build_plan({**data, **changes})


def _row(method: str, needed: int, held: int, *, fits: bool) -> dict[str, Any]:
    config = Settings(model="org/model", prompt_length=256, completion_length=768).to_dict()
    return {
        "method": method, "config": config, "fits": fits, "peak_bytes": held * GIB, "device_peak_bytes": needed * GIB,
        "host_bytes": GIB, "largest_category": "optimizer_state", "phase": "optimizer_step",
        "categories": {"weights": 9 * GIB, "optimizer_state": (held - 9) * GIB},
    }  # fmt: skip


def test_a_plan_follows_the_schema() -> None:
    validate(sample_plan().data)


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_no_line_of_the_terminal_is_wider_than_it_and_what_is_left_out_is_named(width: int) -> None:
    names = ("full + 8-bit + checkpointing", "QLoRA, lean trainer")
    largest = {**_row("", 20, 18, fits=True), "device_peak_bytes": 21 * GIB}
    rows = [{**_row(name, 164 - 60 * i, 142 - 60 * i, fits=False), "largest": largest} for i, name in enumerate(names)]
    plan = sample_plan(rows=rows, best=None, code=None)
    text = render_plan(plan, width)
    assert max(map(len, text.splitlines())) <= width
    assert "does not fit" in text
    head = next(line for line in text.splitlines() if line.startswith("Method"))
    words = " ".join(text.split())
    for name in plan.cells()[0]:
        assert (name in head) != (f"No room here for {name}" in words or name in words.partition("No room here")[2])
    assert "Longest completion" in head or width == 60


@pytest.mark.parametrize("width", [60, 100])
def test_the_terminal_shows_table_bars_and_settings(width: int) -> None:
    text = render_plan(sample_plan(), width)
    same(f"plan-{width}.txt", text)
    bars = render_bars(sample_plan(), width)
    assert bars in text
    assert max(map(len, bars.splitlines())) <= width
    assert CODE in text


@pytest.mark.parametrize("timed", [False, True])
def test_what_was_searched_for_is_shown_beside_its_time(timed: bool) -> None:
    rows = [{**row, "step_s": 41.0 if timed else None} for row in sample_plan().data["rows"]]
    rows = [{**row, "largest": {**row, "config": {**row["config"], "completion_length": 704}}} for row in rows]
    lines = render_plan(sample_plan(rows=rows, best=None, code=None), 160).splitlines()
    head = next(line for line in lines if line.startswith("Method"))
    assert head.rstrip().endswith("Longest completion")
    assert ("Step" in head) is timed
    for line in lines[lines.index(head) + 1 :][: len(rows)]:
        assert line.endswith("704")
        assert len(line) == len(head)
        assert ("≈ 41.0 s" in line) is timed


def test_bars_are_on_one_scale() -> None:
    full, lora = (line.count("W") for line in render_bars(sample_plan()).splitlines()[:2])
    assert full == lora > 10
    drawn = [len(re.search("[WO-]{5,}", line)[0]) for line in render_bars(sample_plan()).splitlines()[:2]]  # type: ignore[index]
    assert drawn[1] / drawn[0] == pytest.approx(20 / 30, abs=0.02)


def test_markdown_has_a_table_and_a_fence() -> None:
    lines = render_markdown(sample_plan()).splitlines()
    assert {line.count("|") for line in lines[:4]} == {8}
    assert f"```python\n{CODE}\n```" in "\n".join(lines)


def test_where_nothing_fits_there_is_nothing_to_paste() -> None:
    plan = sample_plan(best=None, code=None)
    assert "Nothing tried fits." in render_plan(plan)
    assert "```" not in render_markdown(plan)
    assert "Ready to paste" not in render_page(plan)


def test_the_page_draws_rows_and_holds_the_json() -> None:
    page = render_page(sample_plan())
    assert "<lora>" not in page
    assert "<b>model" not in page
    widths = [float(w) for w in re.findall(r'class="seg c-weights" style="width:([\d.]+)%"', page)]
    assert len(widths) == 2
    assert widths[0] == pytest.approx(widths[1], abs=0.2)
    assert packed(page)["report"] == sample_plan().data


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: make browser")
def test_the_page_opens_without_a_complaint(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    path.write_text(render_page(sample_plan()), encoding="utf-8")
    with chromium() as browser, open_page(browser, path) as page:
        assert page.problems == []
        assert violations(page) == []
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.click("#best .copy")
        page.wait_for_timeout(100)
        assert page.evaluate("navigator.clipboard.readText()") == CODE
        label, line = page.locator(".limit").bounding_box(), page.locator(".cap").first.bounding_box()
        assert label["x"] + label["width"] <= line["x"] + 2  # the words stand clear of the line
        before = page.locator("#theme").inner_text()
        page.locator("#theme").click()
        assert page.locator("#theme").inner_text() != before
        with page.expect_download() as download:
            page.locator("#download").click()
        assert download.value.suggested_filename.endswith(".json")


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: make browser")
@pytest.mark.parametrize("width", [320, 420])
def test_the_page_is_read_on_a_phone(tmp_path: Path, width: int) -> None:
    path = tmp_path / "plan.html"
    path.write_text(render_page(sample_plan()), encoding="utf-8")
    with chromium() as browser, open_page(browser, path, viewport={"width": width, "height": 800}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        sizes = page.evaluate(
            "Array.from(document.querySelectorAll('.grown span')).map(e => parseFloat(getComputedStyle(e).fontSize))"
        )
        assert min(sizes) >= 12
