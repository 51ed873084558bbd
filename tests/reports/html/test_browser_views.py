"""Individual allocations over time, the map of segments, and what follows the cursor, in headless Chromium."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from memprof.reports.document.build import document_of
from memprof.reports.html.report import write_html

from memprof.analysis.analysis import analyze
from tests.reports.html.browser import CHROMIUM, chromium, open_page, violations
from tests.synthetic import SnapshotBuilder

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: make browser")]

MIB = 1 << 20


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks of one line, one large one between others, and many small ones that nobody draws one by one."""
    folder = tmp_path_factory.mktemp("views")
    build = SnapshotBuilder()
    first = [build.alloc(64 * MIB, "silu", "forward") for _ in range(2)]
    big = build.alloc(200 * MIB, "attend", "forward")
    small = [build.alloc(MIB, "tiny", "forward") for _ in range(30)]
    build.free(big)
    for address in [*first, *small]:
        build.free(address)
    build.alloc(30 * MIB, "late", "step")
    page = folder / "report.html"
    write_html(document_of(analyze(build.save(folder / "run.pickle"))), page)
    return page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def by_allocation(page: Any) -> None:
    page.locator('[data-choice="by"][data-value="allocation"]').click()
    page.locator("#bands").wait_for()


def selected(page: Any) -> str:
    page.wait_for_timeout(60)
    return str(page.locator("#selected").inner_text())


def test_arrow_keys_select_an_allocation_and_escape_clears_it(browser: Any, file: Path) -> None:
    with open_page(browser, file) as page:
        by_allocation(page)
        page.locator("#chart").focus()
        page.keyboard.press("p")
        page.keyboard.press("ArrowUp")
        assert "64.0 MiB" in selected(page)
        assert "Same line: 2 allocations, 128 MiB alive here." in selected(page)
        assert "silu" in page.locator("#selected pre").first.inner_text()
        page.keyboard.press("ArrowUp")
        page.keyboard.press("ArrowUp")
        assert "200 MiB" in selected(page)
        address = page.url.partition("#")[2]
        assert "by=allocation" in address
        assert violations(page) == []
        page.keyboard.press("Escape")
        assert not page.locator("#selected").is_visible()
        page.goto("about:blank")
        page.goto(f"{file.as_uri()}#{address}")
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        assert "200 MiB" in selected(page)
        assert page.problems == []
        assert all(url.startswith(("file:", "about:")) for url in page.requested)


def test_a_click_selects_the_band_below_the_pointer_and_marks_it_elsewhere(browser: Any, file: Path) -> None:
    with open_page(browser, file) as page:
        by_allocation(page)
        page.locator("#bands").scroll_into_view_if_needed()
        # The large block lies above the two of 64 MiB, in the middle of its life.
        page.locator("#chart").focus()
        page.keyboard.press("p")
        line, box = page.locator("#cursor").bounding_box(), page.locator("#bands").bounding_box()
        x, y = line["x"] + 2, box["y"] + 42 + (box["height"] - 82) * (1 - 220 / (358 * 1.06))
        page.mouse.move(x, y)
        assert "200 MiB" in page.locator("#band-tip").inner_text()
        page.mouse.click(x, y)
        assert "200 MiB" in selected(page)
        assert page.locator(".icicle .box.marked").count() >= 1
        page.get_by_role("button", name="In the segment map").click()
        assert page.locator("#segment-map .mark").count() == 1
        page.mouse.move(x, y)
        page.get_by_role("button", name="Clear the selection").click()
        assert page.locator(".marked").count() == 0


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More lines than the table shows at first, of several blocks each, and one block that is freed before the end."""
    folder = tmp_path_factory.mktemp("many")
    build = SnapshotBuilder()
    brief = build.alloc(300 * MIB, "at::empty", "burst", "outer")
    kinds = [[build.alloc((40 + i) * MIB, f"f{i}", "outer") for _ in range(3)] for i in range(30)]
    build.free(brief)
    build.free(kinds[0].pop())
    page = folder / "report.html"
    write_html(document_of(analyze(build.save(folder / "run.pickle"))), page)
    return page


def test_a_selection_says_when_it_was_allocated_and_freed(browser: Any, many: Path) -> None:
    with open_page(browser, many) as page:
        by_allocation(page)
        page.locator("#chart").focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowUp")
        words = selected(page)
        assert "300 MiB" in words
        # Two events for each of 91 allocations and two for its free, 10 µs apart.
        assert re.search(r"Allocated at 0\.0 ms in .*, freed at 1\.8 ms in .*; alive for 1\.8 ms\.", words)


def test_a_recording_without_times_counts_events(browser: Any, tmp_path: Path) -> None:
    build = SnapshotBuilder()
    first = build.alloc(300 * MIB, "burst")
    build.alloc(100 * MIB, "other")
    build.free(first)
    for event in build.events:
        del event["time_us"]
    write_html(document_of(analyze(build.save(tmp_path / "run.pickle"))), tmp_path / "report.html")
    with open_page(browser, tmp_path / "report.html") as page:
        by_allocation(page)
        page.locator("#chart").focus()
        page.keyboard.press("p")
        page.keyboard.press("ArrowUp")
        assert re.search(
            r"Allocated at event \d+ in .*, freed at event \d+ in .*; alive for 4 events\.", selected(page)
        )


CLIPBOARD = "(() => { navigator.clipboard.writeText = async (text) => { window.copied = text; }; })()"


def csv_rows(page: Any) -> list[dict[str, str]]:
    page.evaluate(CLIPBOARD)
    page.evaluate("window.copied = null")
    page.locator("#allocations .table-tools button").click()
    page.wait_for_function("window.copied")
    return list(csv.DictReader(io.StringIO(page.evaluate("window.copied"))))


def test_a_row_is_filtered_by_its_allocations_and_the_csv_has_all_that_match(browser: Any, many: Path) -> None:
    with open_page(browser, many) as page:
        assert page.locator("#allocation-table tbody tr:visible").count() == 20
        assert len(csv_rows(page)) == 31
        page.select_option("#least-bytes", str(100 * MIB))
        (only,) = csv_rows(page)  # rows of three blocks of 50 MiB are no allocations of 100 MiB
        assert only["Size (bytes)"] == str(300 * MIB)
        assert only["Stack"].startswith("train.py:1 ")
        assert "Allocations of 100 MiB or more each: 1 line, 300 MiB" in page.locator("#nothing").inner_text()


def test_search_pictures_and_csv_follow_the_cursor(browser: Any, many: Path) -> None:
    with open_page(browser, many) as page:
        page.locator("#chart").focus()
        page.keyboard.press("End")
        page.locator("#allocations .moment-table table").wait_for()
        heading = page.locator("#allocations-title")
        assert heading.inner_text().startswith("Allocations alive at ")
        assert "at the peak" not in heading.inner_text()
        assert len(csv_rows(page)) == 30
        page.fill("#filter", "outer")  # the outermost frame
        assert "30 lines" in page.locator("#nothing").inner_text()
        assert "30" in page.locator("#icicle-found").inner_text()
        page.select_option("#least-bytes", str(100 * MIB))
        assert page.locator("#allocations .moment-table tbody tr:visible").count() == 0
        with page.expect_download() as saved:
            page.get_by_role("button", name="Save the picture (icicle) as SVG").click()
        assert "This moment" in Path(saved.value.path()).read_text(encoding="utf-8")
        page.locator("#icicle .moment-note button").click()
        page.locator("#icicle-root").wait_for()
        assert heading.inner_text().startswith("Allocations alive at the peak")
        assert page.problems == []


def test_a_link_to_a_selection_leads_to_it(browser: Any, many: Path) -> None:
    with open_page(browser, many) as page:
        by_allocation(page)
        page.evaluate("window.scrollTo(0, 0)")
        page.locator("#chart").focus(timeout=1000)
        page.keyboard.press("p")
        page.keyboard.press("ArrowUp")
        address = page.url
    with open_page(browser, many) as page:
        page.goto("about:blank")
        page.goto(address)
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        assert 0 <= page.locator("#timeline h2").bounding_box()["y"] < 400


def test_a_box_of_the_icicle_selects_its_band(browser: Any, file: Path) -> None:
    with open_page(browser, file) as page:
        by_allocation(page)
        page.locator("#icicle-root .box[data-open]", has_text="200 MiB").first.click()
        page.keyboard.press("Escape")
        assert "200 MiB" in selected(page)


def test_the_icicle_and_the_table_follow_the_cursor(browser: Any, file: Path) -> None:
    with open_page(browser, file) as page:
        page.locator("#chart").focus()
        page.keyboard.press("End")
        page.locator("#icicle .moment-note").wait_for()
        assert "30.0 MiB of 30.0 MiB from 1 individual allocation" in page.locator("#icicle .moment-note").inner_text()
        assert not page.locator("#icicle-root").is_visible()
        assert page.locator("#allocations .moment-table tbody tr").count() == 1
        assert violations(page) == []
        page.fill("#filter", "late")
        assert "30.0 MiB" in page.locator("#nothing").inner_text()
        assert "30.0 MiB" in page.locator("#icicle-found").inner_text()
        page.fill("#filter", "")
        page.locator("#icicle .moment-note button").click()
        page.locator("#icicle-root").wait_for()
        assert not page.locator("#allocations .moment-table").is_visible()
        assert page.problems == []


def test_the_segment_map_shows_other_moments_by_mouse_and_keyboard(browser: Any, file: Path) -> None:
    with open_page(browser, file) as page:
        words = page.locator("#segment-words").inner_text()
        assert "Allocated peak" in words
        page.locator("[data-map]", has_text="End").click()
        assert page.locator("#segment-words").inner_text().startswith("End")
        page.locator("#segment-map").focus()
        page.keyboard.press("ArrowRight")
        about = page.locator("#segment-about").inner_text()
        assert re.search(r"MiB at 0x7[0-9a-f]+.*, in .*default pool, stream 0", about)
        assert page.locator("[data-pools]:visible").count() == 1
        assert "Idle in whole segments" in page.locator("[data-pools]:visible").inner_text()
        page.keyboard.press("Escape")
        assert page.locator("#segment-map .mark").count() == 0
        assert violations(page) == []
        assert page.problems == []


def test_the_segment_map_reads_without_scripts(browser: Any, file: Path) -> None:
    with open_page(browser, file, java_script_enabled=False) as page:
        assert page.locator("#segments svg").is_visible()
        assert "Idle in whole segments" in page.locator("#segments table:visible").first.inner_text()


def test_nothing_is_cut_on_a_narrow_screen(browser: Any, many: Path) -> None:
    with open_page(browser, many, viewport={"width": 400, "height": 800}) as page:
        right = "element => element.getBoundingClientRect().right"
        assert all(link.evaluate(right) <= 400 for link in page.locator("#contents a").all())
        first, second = (page.locator(f".bar-axis span:nth-child({n})").first.bounding_box() for n in (1, 2))
        assert first["x"] + first["width"] + 8 <= second["x"]
        labels = page.locator(".segments-svg text")
        assert max(label.evaluate(right) for label in labels.all()[:3]) <= 400


def test_a_saved_picture_is_what_is_shown(browser: Any, file: Path) -> None:
    with open_page(browser, file) as page:
        by_allocation(page)
        with page.expect_download() as saved:
            page.get_by_role("button", name="Save the picture (timeline) as SVG").click()
        assert "data:image/png" in Path(saved.value.path()).read_text(encoding="utf-8")  # the canvas
        with page.expect_download() as saved:
            page.get_by_role("button", name="Save the picture (segments) as SVG").click()
        assert "<path" in Path(saved.value.path()).read_text(encoding="utf-8")
        assert page.problems == []
