"""Tables that sort, filter, sum and copy; pictures that are saved; the list of contents: by mouse and by keyboard."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from memprof.reports.html.page import download_name
from memprof.reports.html.report import write_html

from memprof.units import amount
from tests.reports.html.browser import CHROMIUM, chromium, open_page, violations
from tests.reports.sample import MIB, sample
from tests.reports.typed import build_document

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: make browser")]

# Pages are opened from disk, where the clipboard cannot be read.
CLIPBOARD = "(() => { navigator.clipboard.writeText = async (text) => { window.copied = text; }; })()"


@pytest.fixture(scope="module")
def shared_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_html(build_document(*sample(), label="Run 7, step 2"), path)
    with chromium() as browser, open_page(browser, path) as page:
        page.evaluate(CLIPBOARD)
        yield page
        assert page.problems == []
        assert page.requested == [path.as_uri()]


@pytest.fixture
def page(shared_page: Any) -> Iterator[Any]:
    yield shared_page
    shared_page.select_option("#least-bytes", "0")
    shared_page.select_option("#only-category", "")


def copied(page: Any) -> str:
    """What was copied since the last call."""
    for _ in range(50):
        if words := page.evaluate("window.copied"):
            page.evaluate("window.copied = null")
            return str(words)
        page.wait_for_timeout(20)
    raise AssertionError("nothing was copied")


ROWS = "#allocation-table tbody tr:visible"


def shown_bytes(page: Any) -> list[int]:
    return [int(row.get_attribute("data-bytes")) for row in page.locator(ROWS).all()]


def test_a_heading_sorts_by_mouse_and_by_keyboard(page: Any) -> None:
    size = page.locator("#allocation-table th", has_text="Size")
    first = shown_bytes(page)
    size.locator("button").click()
    assert size.get_attribute("aria-sort") == "descending"
    size.locator("button").focus()
    page.keyboard.press("Enter")
    assert size.get_attribute("aria-sort") == "ascending"
    assert shown_bytes(page) == sorted(shown_bytes(page))
    page.keyboard.press("Enter")
    assert size.get_attribute("aria-sort") is None
    assert shown_bytes(page) == first
    page.locator("#allocation-table th button", has_text="Category").click()
    names = [row.locator("td").nth(1).inner_text().lower() for row in page.locator(ROWS).all()]
    assert names == sorted(names)
    page.locator("#allocation-table th button", has_text="Category").click(click_count=1)
    page.locator("#allocation-table th button", has_text="Category").click()


def test_rows_within_rows_keep_their_order(page: Any) -> None:
    assert page.locator("#components table .sort").count() == 0


def test_filters_by_category_and_size_and_sums_what_is_shown(page: Any) -> None:
    page.select_option("#only-category", "loss_logits")
    assert {row.get_attribute("data-category") for row in page.locator(ROWS).all()} == {"loss_logits"}
    assert page.url.endswith("#only=loss_logits")
    page.select_option("#only-category", "")
    page.select_option("#least-bytes", str(100 * MIB))
    assert shown_bytes(page)
    each = [int(row.get_attribute("data-each")) for row in page.locator(ROWS).all()]
    assert min(each) >= 100 * MIB
    assert f"least={100 * MIB}" in page.url
    lines = f"{len(each)} line{'' if len(each) == 1 else 's'}, {amount(sum(shown_bytes(page)))}"
    assert page.locator("#nothing").inner_text() == f"Allocations of 100 MiB or more each: {lines}"
    words = page.locator("#allocations .sum").inner_text()
    assert words == f"{len(shown_bytes(page))} rows shown, {amount(sum(shown_bytes(page)))}"


def test_copies_the_rows_shown_as_csv_with_exact_bytes(page: Any) -> None:
    page.locator("#allocations .table-tools button", has_text="Copy as CSV").click()
    rows = list(csv.DictReader(io.StringIO(copied(page))))
    assert [int(row["Size (bytes)"]) for row in rows] == shown_bytes(page)
    assert any(" < " in row["Stack"] for row in rows)
    page.locator("#components .table-tools button").focus()
    page.keyboard.press("Enter")
    (total,) = (row for row in csv.DictReader(io.StringIO(copied(page))) if row["Component"] == "Total")
    assert int(total["At the peak (bytes)"]) == sum(sample()[0]["peak"]["categories"].values())


@pytest.mark.parametrize("words", ["=1+1", "@sum", "+cmd", "-cmd"])
def test_a_cell_is_no_formula_in_a_spreadsheet(page: Any, words: str) -> None:
    script = (Path(__file__).resolve().parents[3] / "reports/scripts/tables.js").read_text(encoding="utf-8")
    begin, end = script.index("const csvCell"), script.index("/** What is shown in")
    assert page.evaluate(f"words => {{ {script[begin:end]} return csvCell(words); }}", words) == f"'{words}"


@pytest.mark.parametrize("kind", ["peak", "timeline", "icicle"])
def test_saves_each_picture_under_the_runs_name(page: Any, tmp_path: Path, kind: str) -> None:
    for form in ("SVG", "PNG"):
        with page.expect_download() as download:
            page.get_by_role("button", name=f"Save the picture ({kind}) as {form}").click()
        assert download.value.suggested_filename == f"Run-7-step-2-{kind}.{form.lower()}"
        download.value.save_as(tmp_path / form)
    assert (tmp_path / "PNG").read_bytes().startswith(b"\x89PNG")
    picture = ElementTree.parse(tmp_path / "SVG").getroot()
    assert float(picture.attrib["width"].removesuffix("px")) > 500
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}text"))) >= 1
    assert len((tmp_path / "SVG").read_text()) > 1000


def test_the_report_is_saved_under_the_runs_name(page: Any) -> None:
    with page.expect_download() as download:
        page.click("#download")
    assert download.value.suggested_filename == "Run-7-step-2-memprof-report.json"


@pytest.mark.parametrize(
    ("title", "name"),
    [("run.pickle", "run"), ("a/b: 8 ranks", "a-b-8-ranks"), ("../..", "memprof"), ("Qwen2.5-0.5B", "Qwen2.5-0.5B")],
)
def test_a_title_as_a_files_name(title: str, name: str) -> None:
    assert download_name(title) == name


def test_the_contents_stay_in_sight_and_lead_to_sections(page: Any) -> None:
    link = page.locator("#contents a", has_text="Allocations")
    link.focus()
    page.keyboard.press("Enter")
    page.locator("#contents a[aria-current]", has_text="Allocations").wait_for()
    bar, heading = (page.locator(where).bounding_box() for where in ("#contents", "#allocations h2"))
    assert bar["y"] == 0
    assert bar["height"] <= heading["y"] < 200
    assert page.evaluate("document.activeElement.id") == "allocations-title"
    page.locator("#contents a", has_text="Overview").click()
    page.locator("#contents a[aria-current]", has_text="Overview").wait_for()


def test_a_copied_link_shows_the_same_moment_and_selection(page: Any) -> None:
    page.select_option("#least-bytes", str(100 * MIB))
    page.locator("#chart").focus()
    page.keyboard.press("Home")
    page.click("#copy-link")
    link = copied(page)
    assert link.startswith(page.url)
    assert "at=" in link
    page.locator("#chart").focus()
    page.keyboard.press("Escape")


def test_a_copied_link_leads_to_the_section_that_its_reader_saw(page: Any) -> None:
    page.locator("#contents a", has_text="Phases").click()
    page.locator("#contents a[aria-current]", has_text="Phases").wait_for()
    page.click("#copy-link")
    link = copied(page)
    assert "section=phases" in link
    page.evaluate("window.scrollTo(0, 0)")
    page.wait_for_function("window.scrollY === 0")
    page.evaluate("link => { location.hash = link.split('#')[1]; }", link)
    page.wait_for_function("window.scrollY > 400")
    assert 0 <= page.locator("#phases h2").bounding_box()["y"] < 400
    page.evaluate("location.hash = ''")
    page.evaluate("window.scrollTo(0, 0)")


def test_nothing_against_the_rules_of_accessibility(page: Any) -> None:
    assert violations(page) == []
