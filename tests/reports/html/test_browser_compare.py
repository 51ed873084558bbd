"""The comparison's page in real headless Chromium, and what axe-core says about every kind of page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from memprof.reports.html.compare import write_comparison
from memprof.reports.html.report import write_html

from tests.reports.compared import hostile_comparison, published_comparison, sample_comparison
from tests.reports.html.browser import CHROMIUM, chromium, open_page, violations
from tests.reports.sample import hostile, sample
from tests.reports.typed import build_comparison, build_document

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: make browser")]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = {name: folder / f"{name}.html" for name in ("one", "hostile", "two", "published", "hostile-compare")}
    write_html(build_document(*sample()), found["one"])
    write_html(build_document(*hostile()), found["hostile"])
    write_comparison(build_comparison(*sample_comparison()), found["two"])
    write_comparison(build_comparison(published_comparison()), found["published"])
    write_comparison(build_comparison(*hostile_comparison()), found["hostile-compare"])
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser: Any, pages: dict[str, Path]) -> Iterator[Any]:
    with open_page(browser, pages["two"]) as found:
        yield found
        assert found.problems == []


def exact(index: int) -> float:
    """The peak of one run in GiB, from the JSON."""
    data, documents = sample_comparison()
    document = documents[index]
    assert document is not None
    assert document.timeline is not None
    del data
    return document.timeline.total[document.timeline.peak_point] / 2**30


def drawn_peak(page: Any) -> float:
    return float(
        page.evaluate(
            """() => { const t = document.getElementById("chart").data.filter(d => d.stackgroup);
            return Math.max(...t[0].y.map((_, i) => t.reduce((sum, d) => sum + d.y[i], 0))); }"""
        )
    )


def test_opens_quietly_and_alone(browser: Any, pages: dict[str, Path]) -> None:
    with open_page(browser, pages["two"]) as page:
        assert page.problems == []
        assert page.requested == [pages["two"].as_uri()]
        assert page.locator(".total-gib").all_inner_texts() == ["6.78", "4.70"]
        assert "31% less" in page.locator("#summary").inner_text()


def test_the_switch_shows_each_runs_own_timeline_on_one_scale(page: Any) -> None:
    scale = "document.getElementById('chart')._fullLayout.yaxis.range"
    before = page.evaluate(scale)
    assert drawn_peak(page) == pytest.approx(exact(0), abs=1e-9)
    assert page.locator("#panel-total").inner_text() == f"{exact(0):.2f} GiB"
    page.locator('[data-choice="run"]').nth(1).click()
    assert drawn_peak(page) == pytest.approx(exact(1), abs=1e-9)
    assert page.locator("#panel-total").inner_text() == f"{exact(1):.2f} GiB"
    assert page.evaluate(scale) == before
    assert before[1] > exact(0)
    page.click("[data-value=time]")
    page.click("[data-value=peak]")
    assert drawn_peak(page) == pytest.approx(exact(1), abs=1e-9)


def test_keyboard_alone(page: Any) -> None:
    """Tab to the switch, choose the other run, on to the chart, move the cursor, and open a row."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('[data-choice=run][data-value=\"1\"]')"):
            break
    page.keyboard.press("Enter")
    assert page.locator("#panel-total").inner_text() == f"{exact(1):.2f} GiB"
    while page.evaluate("document.activeElement.id") != "chart":
        page.keyboard.press("Tab")
    page.keyboard.press("Home")
    assert page.locator("#panel-title").inner_text() == "At this moment"
    page.keyboard.press("p")
    assert page.locator("#panel-title").inner_text() == "Peak"
    page.locator('tr[data-path="grpo_loss"] .toggle').focus()
    assert not page.locator('tr[data-path="grpo_loss/loss_logits"]').is_visible()
    page.keyboard.press("Enter")
    assert page.locator('tr[data-path="grpo_loss/loss_logits"]').is_visible()


def test_focus_is_always_seen(page: Any) -> None:
    stops = []
    for _ in range(30):
        page.keyboard.press("Tab")
        stops.append(
            page.evaluate(
                """() => { const e = document.activeElement, s = getComputedStyle(e);
                const seen = s.outlineStyle !== "none" && parseFloat(s.outlineWidth) > 0;
                return [e.id || e.textContent.slice(0, 20), seen || e === document.body]; }"""
            )
        )
    assert len({name for name, _ in stops}) > 15
    assert [name for name, seen in stops if not seen] == []


def test_columns_are_equally_wide_so_that_bars_compare(page: Any) -> None:
    widths = page.evaluate(
        """() => Array.from(document.querySelectorAll("tr[data-path=total] .figure .bar"))
            .map(bar => bar.getBoundingClientRect().width)"""
    )
    assert len(widths) == 2
    assert widths[0] == pytest.approx(widths[1], abs=1)
    assert widths[0] > 60


def test_differences_have_their_unit(page: Any) -> None:
    """Each row's difference is that of its two figures, and its cells share their lines."""
    data = sample_comparison()[0]
    total = data["rows"][-1]["at_peak"]
    cell = page.locator("tr[data-path=total] td.difference").inner_text()
    assert cell == f"−{(total[0] - total[1]) / 2**30:.2f} GiB"
    words = page.locator("#components tr[data-path] td.difference").all_text_contents()
    assert all(w in ("–", "0") or w.endswith(("GiB", "MiB", "KiB", " B")) for w in words)
    heights = "row => new Set(Array.from(row.cells).map(c => Math.round(c.getBoundingClientRect().height))).size"
    assert page.locator("tr[data-path=total]").evaluate(heights) == 1


def test_download_is_the_comparison(page: Any, tmp_path: Path) -> None:
    with page.expect_download() as download:
        page.click("#download")
    assert download.value.suggested_filename.endswith("-memprof-compare.json")
    download.value.save_as(tmp_path / "c.json")
    assert json.loads((tmp_path / "c.json").read_text()) == json.loads(json.dumps(sample_comparison()[0]))


def test_reads_without_javascript(browser: Any, pages: dict[str, Path]) -> None:
    with open_page(browser, pages["two"], java_script_enabled=False) as page:
        assert page.locator(".timeline-svg").count() == 2
        assert page.locator(".timeline-svg").nth(1).is_visible()
        assert page.locator('tr[data-path="training/weights"]').is_visible()
        assert not page.locator('[data-choice="run"]').first.is_visible()


def test_prints_both_pictures(page: Any) -> None:
    page.emulate_media(media="print")
    assert page.locator(".timeline-svg").nth(0).is_visible()
    assert page.locator(".timeline-svg").nth(1).is_visible()
    assert not page.locator("#chart").is_visible()


@pytest.mark.parametrize("width", [320, 420, 768])
@pytest.mark.parametrize("name", ["two", "published", "hostile-compare"])
def test_narrow_screens_do_not_scroll_sideways(browser: Any, pages: dict[str, Path], name: str, width: int) -> None:
    with open_page(browser, pages[name], viewport={"width": width, "height": 800}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_hostile_names_run_nothing(browser: Any, pages: dict[str, Path]) -> None:
    with open_page(browser, pages["hostile-compare"]) as page:
        page.on("dialog", lambda dialog: pytest.fail(dialog.message))
        page.locator('[data-choice="run"]').nth(1).click()
        page.locator("#chart").focus()
        page.keyboard.press("Home")
        assert page.problems == []
        assert page.requested == [pages["hostile-compare"].as_uri()]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1360), ("dark", 420)])
@pytest.mark.parametrize("name", ["one", "hostile", "two", "published", "hostile-compare"])
def test_axe_finds_nothing(browser: Any, pages: dict[str, Path], name: str, scheme: str, width: int) -> None:
    """Everything opened, in both palettes; a palette has the same colours at either width."""
    with open_page(browser, pages[name], color_scheme=scheme, viewport={"width": width, "height": 900}) as page:
        page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        assert violations(page) == []


def test_axe_would_have_noticed(browser: Any, pages: dict[str, Path]) -> None:
    with open_page(browser, pages["one"]) as page:
        page.evaluate(
            """() => { const p = document.querySelector(".cause"); p.style.color = "#ddd"; p.style.background = "#fff";
            document.querySelector("#filter").removeAttribute("aria-label");
            document.querySelector("#filter").removeAttribute("placeholder"); }"""
        )
        assert {v.split(" ")[0] for v in violations(page)} >= {"color-contrast", "label"}
