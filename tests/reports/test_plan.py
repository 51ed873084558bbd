"""What is shown of a plan: a table and bars for a terminal, Markdown, a page. MEMPROF_UPDATE_SNAPSHOTS=1 rewrites what
is expected; then look at the difference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from memprof.reports.document.plan import PlanDocument
from memprof.reports.html.plan import render_plan as render_page
from memprof.reports.renderers import draw
from msgspec.structs import replace

from memprof.config.settings import Settings
from memprof.plan.headline import headline_of_plan
from memprof.report.codec import to_builtins
from tests.report.files import validate
from tests.reports.html.browser import CHROMIUM, chromium, open_page, violations
from tests.reports.html.test_html import packed
from tests.reports.test_terminal import same
from tests.reports.typed import build_plan

GIB = 2**30
CODE = "args = GRPOConfig(\n    num_generations=4,\n)"


def render_plan(plan: PlanDocument, width: int = 100) -> str:
    return draw("plan", plan, width=width)


def render_markdown(plan: PlanDocument) -> str:
    return draw("plan", plan, "markdown")


def render_bars(plan: PlanDocument) -> str:
    text = render_plan(plan)
    return text[text.index("\n\nfull  ", text.index("Method")) + 2 :]


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
    told = {**data, **changes}
    plan = build_plan(told).plan
    return PlanDocument(replace(plan, headline=headline_of_plan(plan, ())))


def _row(method: str, needed: int, held: int, *, fits: bool) -> dict[str, Any]:
    config = Settings(model="org/model", prompt_length=256, completion_length=768).to_dict()
    return {
        "method": method, "config": config, "fits": fits, "peak_bytes": held * GIB, "device_peak_bytes": needed * GIB,
        "host_bytes": GIB, "largest_category": "optimizer_state", "phase": "optimizer_step",
        "categories": {"weights": 9 * GIB, "optimizer_state": (held - 9) * GIB},
    }  # fmt: skip


def timed_plan(**changes: Any) -> PlanDocument:
    """Three methods with times: one that does not fit, the fastest that fits, and one that is slower and larger."""
    rows = [_row("full", 30, 27, fits=False), _row("<lora>", 20, 18, fits=True), _row("slow", 21, 19, fits=True)]
    for row, seconds, front in zip(rows, (30.0, 41.0, 44.0), (True, True, False), strict=True):
        row.update(step_s=seconds, on_front=front)
    rows[0]["config"]["dtype"] = "bfloat16"
    changed: dict[str, Any] = {"rows": rows, "best": rows[1], "fastest": rows[1], "fastest_code": CODE, **changes}
    return sample_plan(**changed)


def test_a_plan_follows_the_schema() -> None:
    validate(to_builtins(sample_plan().plan))


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_no_line_of_the_terminal_is_wider_than_it_and_what_is_left_out_is_named(width: int) -> None:
    names = ("full + 8-bit + checkpointing", "QLoRA, lean trainer")
    largest = {**_row("", 20, 18, fits=True), "device_peak_bytes": 21 * GIB}
    rows = [{**_row(name, 164 - 60 * i, 142 - 60 * i, fits=False), "largest": largest} for i, name in enumerate(names)]
    plan = sample_plan(rows=rows, best=None, code=None)
    text = render_plan(plan, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "does not fit" in text
    at = next(i for i, line in enumerate(lines) if line.startswith("Method"))
    heads = " ".join((lines[at - 1] + " " + lines[at]).replace(",", "").split())
    left = " ".join(text.split()).partition("No room here for ")[2].partition(":")[0].replace(" and ", ", ").split(", ")
    for column in plan.table.columns:
        there = set(column.title.split()) <= set(heads.split()) and column.title not in left
        assert "t" not in column.on or there != (column.title in left)
    assert {"Longest", "completion"} <= set(heads.split())


@pytest.mark.parametrize("width", [60, 100])
def test_the_terminal_shows_table_bars_and_settings(width: int) -> None:
    text = render_plan(sample_plan(), width)
    same(f"plan-{width}.txt", text)
    assert max(map(len, text.splitlines())) <= width
    assert CODE in text


@pytest.mark.parametrize("timed", [False, True])
def test_what_was_searched_for_is_shown_beside_its_time(timed: bool) -> None:
    rows = [{**row, "step_s": 41.0 if timed else None} for row in to_builtins(sample_plan().plan)["rows"]]
    rows = [{**row, "largest": {**row, "config": {**row["config"], "completion_length": 704}}} for row in rows]
    lines = render_plan(sample_plan(rows=rows, best=None, code=None), 160).splitlines()
    head = next(line for line in lines if line.startswith("Method"))
    assert "Longest completion" in head
    assert ("Step" in head) is timed
    for line in lines[lines.index(head) + 1 :][: len(rows)]:
        assert line[: head.index("Longest completion") + len("Longest completion")].endswith("704")
        assert ("≈ 41.0 s" in line) is timed


def test_the_front_is_marked_and_the_fastest_is_named() -> None:
    plan = timed_plan()
    validate(to_builtins(plan.plan))
    text = render_plan(plan, 80)
    starred = [line.split()[0] for line in text.splitlines() if line.endswith("*") or " s *" in line]
    assert starred == ["full", "<lora>"]
    assert "* on the front: no other row" in text
    assert "Fastest that fits as given: <lora>, ≈ 41.0 s a step (estimated)." in " ".join(text.split())
    assert text.count(CODE) == 1  # the best is the fastest
    slow = {**to_builtins(plan.plan)["rows"][2], "config": Settings(model="m", optim="sgd").to_dict()}
    other = timed_plan(best=slow)
    assert render_plan(other, 80).count(CODE) == 2
    assert "\\*" in render_markdown(plan)


def test_ties_are_said() -> None:
    rows = to_builtins(timed_plan().plan)["rows"]
    assert "As fast to within 10%, which no estimate tells apart: slow." in timed_plan(rows=rows).fastest_sentence
    rows[2]["step_s"] = 46.0
    assert "As fast" not in timed_plan(rows=rows).fastest_sentence


def test_a_card_without_a_speed_and_nothing_that_fits_are_said() -> None:
    assert sample_plan().fastest_sentence.startswith("No time is estimated: the speed of 24GB is unknown.")
    assert "No row fits as given" in timed_plan(fastest=None).fastest_sentence
    assert "Memory against time" not in render_page(sample_plan())


def test_rows_that_do_other_work_are_compared_by_the_token() -> None:
    rows = to_builtins(timed_plan().plan)["rows"]
    rows[2]["config"]["completion_length"] = 2 * 768 + 256  # twice the tokens
    plan = timed_plan(rows=rows)
    assert plan.per_tokens
    seconds = [point.seconds for point in plan.priced()]
    assert seconds == [pytest.approx(s * 1e3 / 8192, abs=1e-6) for s in (30.0, 41.0, 22.0)]
    assert "tokens (estimated)" in plan.fastest_sentence


def test_bars_are_on_one_scale() -> None:
    full, lora = (line.count("W") for line in render_bars(sample_plan()).splitlines()[:2])
    assert full == lora > 10
    drawn = [len(re.search("[WO¦-]{5,}", line)[0]) for line in render_bars(sample_plan()).splitlines()[:2]]  # type: ignore[index]
    assert drawn[1] / drawn[0] == pytest.approx(20 / 30, abs=0.02)


def test_markdown_has_a_table_and_a_fence() -> None:
    lines = render_markdown(sample_plan()).splitlines()
    assert {line.count("|") for line in lines if line.startswith("|")} == {8}
    assert f"```python\n{CODE}\n```" in "\n".join(lines)


def test_where_nothing_fits_there_is_nothing_to_paste() -> None:
    plan = sample_plan(best=None, code=None, rows=[_row("full", 30, 27, fits=False)])
    assert render_plan(plan).startswith("Nothing tried fits 24GB: the smallest, full, needs 30.00 of 24.00 GiB")
    assert "```" not in render_markdown(plan)
    assert "Ready to paste" not in render_page(plan)


def test_the_page_draws_rows_and_holds_the_json() -> None:
    page = render_page(sample_plan())
    assert "<lora>" not in page
    assert "<b>model" not in page
    widths = [float(w) for w in re.findall(r'class="seg c-weights" style="width:([\d.]+)%"', page)]
    assert len(widths) == 2
    assert widths[0] == pytest.approx(widths[1], abs=0.2)
    assert packed(page)["report"] == to_builtins(sample_plan().plan)


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
def test_the_chart_has_a_point_for_each_row_and_shows_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    path.write_text(render_page(timed_plan()), encoding="utf-8")
    with chromium() as browser, open_page(browser, path) as page:
        assert page.problems == []
        assert violations(page) == []
        points = page.locator("#front-chart .point")
        assert points.count() == 3
        drawn = page.evaluate("document.getElementById('front-chart').data.map((t) => [t.mode, t.x, t.y])")
        assert drawn[0] == ["lines", [20, 30], [41, 30]]  # the front
        points.first.scroll_into_view_if_needed()
        box = points.first.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.wait_for_selector("#front-chart .hovertext")
        told = page.locator("#front-chart .hovertext").text_content()
        assert "does not fit" in told
        assert "dtype = bfloat16" in told
        assert "limit 23.00 GiB" in page.locator("#front-chart").text_content()


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


@pytest.mark.parametrize(
    ("maximized", "said"),
    [
        ("context", "with smaller micro-batches"),
        ("num_generations", "with as many completions in a micro-batch"),
        ("batch", "what is largest was simulated too"),
        ("speed", "as given, and in smaller micro-batches if that does not fit; every row"),
    ],
)
def test_the_page_says_what_a_search_changed(maximized: str, said: str) -> None:
    rows = [dict(row) for row in to_builtins(timed_plan().plan)["rows"]]
    rows[1]["largest"] = dict(rows[1])
    page = render_page(timed_plan(rows=rows, maximized=maximized))
    assert said in page
    assert ("micro-batches" in page) == (maximized in ("context", "speed"))
