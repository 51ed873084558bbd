"""The page of many ranks in headless Chromium: accessible, light and dark, on narrow screens, and with 1024 ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from memprof.reports.html.report import write_html

from tests.analysis.ranks.simulated import many_ranks
from tests.reports.html.browser import CHROMIUM, chromium, open_page, violations
from tests.reports.sample import sample
from tests.reports.typed import build_document

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: make browser")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def page_of(folder: Path, world: int) -> Path:
    path = folder / f"{world}.html"
    write_html(build_document(many_ranks(world, missing=(3,)), sample()[1]), path)
    return path


@pytest.mark.parametrize(
    "context",
    [{}, {"color_scheme": "dark"}, {"viewport": {"width": 420, "height": 900}}],
    ids=["light", "dark", "narrow"],
)
def test_axe_finds_nothing_and_nothing_scrolls_sideways(browser: Any, tmp_path: Path, context: dict[str, Any]) -> None:
    with open_page(browser, page_of(tmp_path, 40), **context) as page:
        page.locator(".more-ranks > summary").click()
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.problems == []
        assert len(page.requested) == 1


def test_what_is_read_is_what_the_json_holds(browser: Any, tmp_path: Path) -> None:
    """The page's own download and its tables agree: every rank, the fullest first; sums of a row are its peak."""
    report = many_ranks(40, missing=(3,))
    with open_page(browser, page_of(tmp_path, 40), java_script_enabled=False) as page:
        rows = page.locator("table.ranks tbody tr")
        assert rows.count() == 39
        first = rows.nth(0)
        fullest = max(report["ranks"], key=lambda r: r["peak"]["active_bytes"])
        assert first.locator("th").inner_text().split()[0] == str(fullest["rank"])
        assert f"{fullest['peak']['active_bytes'] / 2**30:.2f}" in first.inner_text()
        assert page.locator(".rank-picture").get_attribute("aria-label").startswith("Ranks 0 to 39")


@pytest.mark.slow
def test_1024_ranks_open_in_a_small_page(browser: Any, tmp_path: Path) -> None:
    """How soon it opens is measured by ``python -m benchmarks.reading ranks``."""
    path = page_of(tmp_path, 1024)
    assert path.stat().st_size < 3_000_000
    with open_page(browser, path) as page:
        assert page.locator("table.ranks tbody tr").count() == 1023
        assert page.problems == []
