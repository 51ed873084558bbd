"""A real TensorBoard on a real run's log directory: its scalars, and the Memory tab in Chromium."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

pytest.importorskip("tensorboard")

from memprof.units import GIB, amount
from tests.reports.html.browser import CHROMIUM, chromium
from tests.tensorboard.server import get, listing, tensorboard

pytestmark = [
    pytest.mark.slow,
    pytest.mark.trl,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
PLUGIN = "/data/plugin/memprof"


def peak_in_words(report: dict[str, Any]) -> str:
    return f"{amount(report['peak']['allocated_bytes'])} in {report['peak']['phase']}"


def page_of(base: str, run: str, step: int = 2, rank: int = 0) -> tuple[int, dict[str, str], bytes]:
    return get(f"{base}{PLUGIN}/page?" + urlencode({"run": run, "step": step, "rank": rank}))


# -- over HTTP ---------------------------------------------------------------------------------------------------------


def scalars(base: str) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Every scalar TensorBoard has read, by run and tag."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for run, tags in json.loads(get(f"{base}/data/plugin/scalars/tags")[2]).items():
        for tag in tags:
            rows = json.loads(get(f"{base}/data/plugin/scalars/scalars?run={quote(run)}&tag={quote(tag)}")[2])
            found.setdefault(run.split("/")[0], {})[tag] = [(step, value) for _, step, value in rows]
    return found


def test_scalars_are_the_trainers_and_the_reports(board: str, logdir: Path, reports: dict[str, Any]) -> None:
    deadline = time.monotonic() + 60
    while set(read := scalars(board)) != {"full", "lora"} and time.monotonic() < deadline:
        time.sleep(0.5)  # TensorBoard reads in the background
    for run, report in reports.items():
        log = json.loads((logdir / run / "log.json").read_text())
        for name in ("loss", "reward", "memory/host_rss"):  # not a point of the trainer's is lost
            told = [(row["step"], pytest.approx(row[name], rel=1e-5, abs=1e-8)) for row in log if name in row]
            assert len(told) == 3
            assert read[run][f"train/{name}"] == told
        peak = report["peak"]
        expected = {"peak_allocated": peak["allocated_bytes"], "group/total": peak["groups"]["total"]}
        expected |= {f"category/{c}": n for c, n in peak["categories"].items() if n}
        for phase in ("generate", "forward", "backward"):
            expected[f"phase/{phase}"] = max(p["peak_allocated_bytes"] for p in report["phases"] if p["phase"] == phase)
        for name, size in expected.items():
            assert read[run][f"train/memory/{name}"] == [(2, pytest.approx(size / GIB, rel=1e-6))], name


def test_at_most_four_charts_are_laid_out(board: str) -> None:
    layout = json.loads(get(f"{board}/data/plugin/custom_scalars/layout")[2])
    charts = [chart for category in layout["category"] for chart in category["chart"]]
    assert 1 <= len({chart["title"] for chart in charts}) <= 4
    assert all(len(chart["multiline"]["tag"]) <= 4 for chart in charts)


def test_the_tab_is_offered_with_every_recording(board: str, reports: dict[str, Any]) -> None:
    plugins = json.loads(get(f"{board}/data/plugins_listing")[2])
    assert plugins["memprof"]["enabled"]
    assert plugins["memprof"]["tab_name"] == "Memory"
    found = {r["run"]: r for r in listing(board)}
    assert set(found) == {"full", "lora"}
    for run, report in reports.items():
        assert found[run]["peak_bytes"] == report["peak"]["allocated_bytes"]
        assert found[run]["peak"] == peak_in_words(report)
        assert (found[run]["step"], found[run]["rank"]) == (2, 0)
    status, headers, _ = get(f"{board}{PLUGIN}/static/index.js")
    assert status == 200
    assert headers["content-type"].startswith("text/javascript")


def test_the_page_allows_its_own_scripts_and_no_others(board: str) -> None:
    status, headers, body = page_of(board, "full")
    assert status == 200
    scripts = [d for d in headers["content-security-policy"].split(";") if d.strip().startswith("script-src")]
    assert len(scripts) == 1
    # The page's own script, and plotly.js, which is inert text until the page runs it.
    assert scripts[0].count("'sha256-") == body.count(b"<script>") + body.count(b'id="plotly-source"') == 2
    assert "'unsafe-inline'" not in scripts[0]
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "query",
    [
        "run=../full&step=2&rank=0", "run=full/_memprof&step=2&rank=0", "run=%2Fetc%2Fpasswd&step=2&rank=0",
        "run=full&step=..%2F2&rank=0", "run=full&step=-2&rank=0", "run=full&step=2&rank=9", "run=full", "",
        "run=full&step=%C2%B2&rank=0", "run=full&step=" + "9" * 5000 + "&rank=0",
    ],
)  # fmt: skip
def test_nothing_else_is_read(board: str, query: str) -> None:
    status, headers, body = get(f"{board}{PLUGIN}/page?{query}")
    assert status == 404
    assert headers["content-type"].startswith("text/plain")
    assert headers["x-content-type-options"] == "nosniff"
    assert body == b"no such recording"


def test_static_files_are_ours_alone(board: str) -> None:
    for path in ("/static/../plugin.py", "/static/%2e%2e/plugin.py", "/static/", "/files"):
        assert get(f"{board}{PLUGIN}{path}")[0] == 404


def test_trouble_stays_in_its_own_page(troubled: Path, tmp_path: Path) -> None:
    with tensorboard(troubled, log=tmp_path / "log.txt") as base:
        found = {(r["run"], r["step"]) for r in listing(base)}
        assert found == {("good", 2), ("bad", 1), ("bad", 2), ("bad", 3)}
        for step, words in ((1, "not a memory snapshot"), (2, "the file is empty"), (3, "refused")):
            status, _, body = page_of(base, "bad", step)
            assert status == 200
            assert b"No report" in body
            assert words.encode() in body or step == 3, body
            assert b"Traceback" not in body
        assert page_of(base, "bad", 4)[0] == 404
        assert b'id="memprof-data"' in page_of(base, "good")[2]
    assert not list(tmp_path.rglob("owned"))
    assert not list(troubled.rglob("owned"))


# -- in a browser ------------------------------------------------------------------------------------------------------


class Tab:
    """The Memory tab of a TensorBoard page, and what the browser complained about."""

    def __init__(self, page: Any, base: str, address: str = "") -> None:
        self.page = page
        self.problems: list[str] = []
        self.requested: list[str] = []
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.requested.append(request.url))
        page.goto(address or f"{base}/#memprof")

    def _heard(self, message: Any) -> None:
        # TensorBoard's own: it looks for its fonts outside its path prefix.
        if message.type == "error" and "font-roboto" not in message.location.get("url", ""):
            self.problems.append(f"{message.text} {message.location}")

    def frame(self, part: str, seconds: float = 60) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for frame in self.page.frames:
                if part in frame.url:
                    return frame
            self.page.wait_for_timeout(100)
        raise AssertionError(f"no frame {part}: {[f.url for f in self.page.frames]}")

    @property
    def picker(self) -> Any:
        frame = self.frame("plugin_entry.html")
        frame.wait_for_selector("#first-run")
        return frame

    def report(self, part: str) -> Any:
        frame = self.frame(part)
        frame.wait_for_selector("html[data-charts=yes]", state="attached", timeout=60_000)
        return frame


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def tab(browser: Any, board: str) -> Iterator[Tab]:
    view = browser.new_context(viewport={"width": 1360, "height": 900})
    try:
        yield Tab(view.new_page(), board)
    finally:
        view.close()


# The tab's pages are ours and come by the same way whichever reader TensorBoard has for its scalars.
with_one_reader = pytest.mark.parametrize("board", ["true"], indirect=True, ids=["load_fast"])


@needs_browser
@pytest.mark.browser
@with_one_reader
def test_the_report_is_in_the_tab(tab: Tab, board: str, reports: dict[str, Any]) -> None:
    tab.report("/page?run=lora")  # the run that was written last
    tab.picker.select_option("#first-run", "full")
    report = tab.report("/page?run=full")
    shown = report.locator("body").inner_text()
    assert "Weights" in shown
    assert report.evaluate("typeof Plotly") == "object"
    assert report.locator("#chart .plot-container").count() == 1
    data = report.evaluate(
        "async () => { const raw = Uint8Array.from(atob(document.getElementById('memprof-data').textContent.trim()),"
        " c => c.charCodeAt(0)); return new Response(new Blob([raw]).stream()"
        ".pipeThrough(new DecompressionStream('gzip'))).json() }"
    )
    assert data["report"]["peak"]["categories"] == reports["full"]["peak"]["categories"]
    tab.picker.select_option("#first-run", "lora")
    assert tab.report("/page?run=lora").locator("h1").count() == 1

    words = tab.picker.locator("#first-step option").first.inner_text()
    assert words == f"step 2 · {peak_in_words(reports['lora'])}"
    tab.picker.select_option("#second-run", "full")
    both = tab.report("/compare").locator("body").inner_text()
    assert "lora" in both
    assert "full" in both
    assert "Difference" in both
    tab.picker.select_option("#second-run", "")
    tab.report("/page?run=lora")

    for dark, theme in ((True, "dark"), (False, "light")):
        tab.page.evaluate(f"document.body.classList.toggle('dark-mode', {str(dark).lower()})")
        tab.page.wait_for_timeout(300)
        assert tab.report("/page?run=lora").evaluate("document.documentElement.dataset.theme") == theme
        assert tab.picker.evaluate("document.documentElement.classList.contains('dark')") is dark
    assert tab.problems == []
    assert all(url.startswith((board.rsplit("/deep", 1)[0], "data:", "blob:")) for url in tab.requested)


# The text of a closed list is as wide as it would be anywhere else.
_TEXT_WIDTH = """(select) => {
    const context = document.createElement("canvas").getContext("2d");
    context.font = getComputedStyle(select).font;
    return context.measureText(select.selectedOptions[0].text).width; }"""


@needs_browser
@pytest.mark.browser
@with_one_reader
def test_the_address_names_the_run_and_the_step(tab: Tab, board: str) -> None:
    tab.report("/page?run=lora")
    tab.picker.select_option("#first-run", "full")
    tab.report("/page?run=full")
    step = tab.picker.locator("#first-step")
    assert step.evaluate("(select) => select.clientWidth") > step.evaluate(_TEXT_WIDTH)
    link = tab.page.url
    assert link.endswith("#memprof&p.memprof.run=full&p.memprof.step=2&p.memprof.rank=0")
    tab.picker.select_option("#second-run", "lora")
    tab.report("/compare")
    both = tab.page.url
    assert both == f"{link}&p.memprof.with_run=lora&p.memprof.with_step=2&p.memprof.with_rank=0"
    assert tab.problems == []
    for address, part in ((link, "/page?run=full"), (both, "a_run=full"), (f"{board}/#memprof", "/page?run=lora")):
        other = Tab(tab.page.context.new_page(), board, address)
        other.report(part)
        assert other.problems == []


@needs_browser
@pytest.mark.browser
@with_one_reader
def test_every_step_is_in_the_trend_though_one_was_recorded(tab: Tab, board: str) -> None:
    trend = json.loads(get(f"{board}{PLUGIN}/trend?run=full&step=2&rank=0")[2])
    assert trend["steps"] == [1, 2, 3]
    curves = {curve["label"]: curve["bytes"] for curve in trend["curves"]}
    assert curves["Peak allocated"][0] is None
    assert curves["Peak allocated"][1] > 0
    assert all(curves["Host, resident"])
    assert json.loads(get(f"{board}{PLUGIN}/trend?run=nobody&step=2&rank=0")[2]) == {"steps": [], "curves": []}
    tab.report("/page?run=lora")
    tab.picker.wait_for_selector("#trend polyline", state="attached")
    assert tab.picker.locator("#trend").inner_text().startswith("Steps 1 to 3")
    assert tab.picker.locator("#trend line.chosen").count() == 1
    assert tab.problems == []


@needs_browser
@pytest.mark.browser
@with_one_reader
def test_refresh_finds_what_was_written_meanwhile(tab: Tab, logdir: Path) -> None:
    tab.report("/page?run=lora")
    late = logdir / "a-later-run"
    try:
        shutil.copytree(logdir / "lora" / "_memprof", late / "_memprof")
        time.sleep(2.5)  # what was found is believed for two seconds
        tab.picker.click("#refresh")
        tab.picker.wait_for_selector("#first-run option[value=a-later-run]", state="attached")
        assert tab.picker.input_value("#first-run") == "lora"
    finally:
        shutil.rmtree(late)
    assert tab.problems == []


@needs_browser
@pytest.mark.browser
def test_the_scalars_tab_shows_the_tags(tab: Tab, board: str) -> None:
    tab.page.goto(f"{board}/?tagFilter=memory%2Fpeak_allocated#timeseries")
    tab.page.get_by_text("train/memory/peak_allocated").first.wait_for(timeout=60_000)


@needs_browser
@pytest.mark.browser
def test_an_empty_log_directory_says_what_to_do(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with tensorboard(tmp_path / "logs", log=tmp_path / "log.txt") as base:
        assert not json.loads(get(f"{base}/data/plugins_listing")[2])["memprof"]["enabled"]
        tab = Tab(browser.new_page(), base)
        tab.picker.get_by_text("MemProfCallback()").wait_for()
        assert tab.problems == []
