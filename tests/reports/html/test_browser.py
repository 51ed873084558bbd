"""The page in real headless Chromium, from a file, as a reader opens it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from memprof.reports.html.report import write_html

from memprof.report.codec import to_builtins
from memprof.units import amount, gib
from tests.reports.html.browser import CHROMIUM, chromium, open_page, violations
from tests.reports.sample import MIB, hostile, sample
from tests.reports.typed import build_document, report_of

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: make browser")]

PEAK = "6.78"
SCRIPTS = Path(__file__).resolve().parents[3] / "reports" / "scripts"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_html(build_document(*sample()), path)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def shared_page(browser: Any, file: Path) -> Iterator[Any]:
    with open_page(browser, file) as page:
        yield page


@pytest.fixture
def page(shared_page: Any, file: Path) -> Any:
    """The page anew, without what an earlier test left in its address."""
    shared_page.goto("about:blank")
    shared_page.goto(file.as_uri())
    shared_page.wait_for_selector("html[data-charts=yes]", state="attached")
    return shared_page


def in_gib(words: str) -> float:
    """GiB of a size as the page writes it: the smaller ones have their own unit."""
    number, _, unit = words.partition(" ")
    return float(number) / {"GiB": 1, "MiB": 2**10, "KiB": 2**20, "": 1}[unit]


def panel(page: Any) -> tuple[str, float, list[float]]:
    """Heading, total and parts of the panel at the cursor, in GiB."""
    parts = page.locator("#panel-parts b").all_inner_texts()
    return (
        page.locator("#panel-title").inner_text(),
        in_gib(page.locator("#panel-total").inner_text()),
        [in_gib(part) for part in parts],
    )


def drawn_peak(page: Any) -> float:
    """The highest total of what plotly has drawn, in GiB."""
    return float(
        page.evaluate(
            """() => { const t = document.getElementById("chart").data.filter(d => d.stackgroup);
            return Math.max(...t[0].y.map((_, i) => t.reduce((sum, d) => sum + d.y[i], 0))); }"""
        )
    )


def test_opens_from_disk_quietly_and_alone(browser: Any, file: Path) -> None:
    with open_page(browser, file) as page:
        assert page.problems == []
        assert page.requested == [file.as_uri()]
        assert page.locator("#peak-gib").inner_text() == PEAK


def test_the_first_screen_and_the_static_timeline_do_not_wait_for_plotly(browser: Any, file: Path) -> None:
    """Nothing is idle here, so plotly comes only when the chart is zoomed."""
    view = browser.new_context(viewport={"width": 1360, "height": 900})
    view.add_init_script("window.requestIdleCallback = () => {};")
    page = view.new_page()
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready=yes]", state="attached")
    assert page.evaluate("typeof Plotly") == "undefined"
    picture = page.locator(".picture svg")
    picture.scroll_into_view_if_needed()
    box = picture.bounding_box()
    page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 0.5 * box["height"])
    title, total, parts = panel(page)
    assert title == "At the cursor"
    assert total == pytest.approx(sum(parts), abs=0.02)
    line = page.locator("#cursor").bounding_box()
    assert box["x"] < line["x"] <= box["x"] + 0.2 * box["width"] + 2  # at the last event before the pointer
    page.locator("#chart").focus()
    page.keyboard.press("p")
    assert panel(page)[0] == "Peak"
    page.keyboard.press("+")
    page.wait_for_selector("html[data-charts=yes]", state="attached")
    assert not picture.is_visible()
    view.close()


def test_scripts_write_sizes_as_the_text_does(page: Any) -> None:
    """Half-way cases too: 1.125 GiB is 1.12 GiB in both."""
    sizes = [eighths * 2**unit for unit in (7, 17, 27) for eighths in (1, 3, 5, 7, 9, 65, 161, 1001, 8188, 8190, 8193)]
    script = (SCRIPTS / "page.js").read_text(encoding="utf-8")
    begin, end = script.index("const GIB"), script.index("const colour")
    written = page.evaluate(f"sizes => {{ {script[begin:end]} return sizes.map(amountOf); }}", sizes)
    assert written == [amount(size) for size in sizes]


def test_the_peak_is_drawn_at_every_width_and_zoom(page: Any) -> None:
    exact = sum(sample()[0]["peak"]["categories"].values()) / 2**30
    for width in (1360, 1000, 700, 420):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(150)
        assert drawn_peak(page) == pytest.approx(exact, abs=1e-9)
    page.set_viewport_size({"width": 1360, "height": 900})
    page.click("[data-value=peak]")
    assert drawn_peak(page) == pytest.approx(exact, abs=1e-9)
    page.locator("#chart").focus()
    for _ in range(4):
        page.keyboard.press("+")
        assert drawn_peak(page) == pytest.approx(exact, abs=1e-9)
    page.click("[data-value=time]")
    assert drawn_peak(page) == pytest.approx(exact, abs=1e-9)


def test_panel_shows_the_peak_and_follows_the_keyboard(page: Any) -> None:
    title, total, parts = panel(page)
    assert (title, total) == ("Peak", float(PEAK))
    assert sum(parts) == pytest.approx(total, abs=0.03)
    page.locator("#chart").focus()
    page.keyboard.press("Home")
    title, total, parts = panel(page)
    assert (title, total) == ("At this moment", 700 / 1024)
    page.keyboard.press("]")
    assert "Generate" in page.locator("#panel-where").inner_text()
    page.keyboard.press("[")
    assert "Load" in page.locator("#panel-where").inner_text()
    page.keyboard.press("p")
    assert panel(page)[:2] == ("Peak", float(PEAK))
    page.keyboard.press("ArrowRight")
    assert panel(page)[0] == "At this moment"
    page.keyboard.press("Escape")


def test_panel_follows_the_mouse_and_a_click_holds_it(page: Any) -> None:
    page.locator("#timeline").scroll_into_view_if_needed()
    box = page.locator("#chart").bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 200)
    assert "Load" in page.locator("#panel-where").inner_text()
    page.mouse.down()
    page.mouse.up()
    held = panel(page)
    assert held[0] == "At this moment"
    page.mouse.move(box["x"] + box["width"] - 30, box["y"] + 200)
    assert panel(page) == held


def test_dragging_zooms_and_double_click_resets(page: Any) -> None:
    page.locator("#timeline").scroll_into_view_if_needed()
    box = page.locator("#chart").bounding_box()
    whole = page.evaluate("document.getElementById('chart')._fullLayout.xaxis.range")
    page.mouse.move(box["x"] + 300, box["y"] + 150)
    page.mouse.down()
    page.mouse.move(box["x"] + 450, box["y"] + 160, steps=5)
    page.mouse.up()
    page.wait_for_timeout(300)
    low, high = page.evaluate("document.getElementById('chart')._fullLayout.xaxis.range")
    assert high - low < (whole[1] - whole[0]) / 2
    for _ in range(4):  # on a busy machine the two clicks can come too far apart to be one double click
        page.mouse.dblclick(box["x"] + 300, box["y"] + 150)
        page.wait_for_timeout(500)
        if page.evaluate("document.getElementById('chart')._fullLayout.xaxis.range") == whole:
            break
    assert page.evaluate("document.getElementById('chart')._fullLayout.xaxis.range") == whole
    assert page.problems == []


def test_axis_range_patterns_and_theme(page: Any) -> None:
    ready = "document.getElementById('chart')._fullLayout"
    times = sample()[1]["time_us"]
    seconds = (times[-1] - times[0]) / 1e6
    page.click("[data-value=time]")
    assert page.evaluate(f"{ready}.xaxis.showticklabels") is True
    assert page.evaluate(f"{ready}.xaxis.range[1]") == pytest.approx(seconds)
    page.click("[data-value=phase]")
    assert page.evaluate(f"{ready}.xaxis.range[1]") == 17
    page.click("#patterns")
    assert page.evaluate("document.getElementById('chart').data.some(d => d.fillpattern && d.fillpattern.shape)")
    colour = "document.getElementById('chart').data[0].fillcolor"
    light = page.evaluate(colour)
    page.click("[data-value=peak]")
    page.click("#theme")
    page.click("#theme")
    page.wait_for_timeout(200)
    assert page.locator("#theme").inner_text() == "Theme: dark"
    assert page.evaluate(colour) != light
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 17, 22)"
    assert page.locator("[data-value=peak]").get_attribute("aria-pressed") == "true"
    page.click("#theme")


def test_rows_open_and_close(page: Any) -> None:
    weights = page.locator('tr[data-path="training/weights"]')
    assert weights.is_visible()
    assert not page.locator('tr[data-path="kv_cache/kv_cache"]').is_visible()
    toggle = page.locator('tr[data-path="training"] .toggle')
    toggle.focus()
    page.keyboard.press("Enter")
    assert not weights.is_visible()
    assert toggle.get_attribute("aria-expanded") == "false"
    page.keyboard.press("Enter")
    page.locator('tr[data-path="training/activations"] .toggle').click()
    assert page.locator('tr[data-path="training/activations/saved"]').is_visible()
    page.locator('tr[data-path="training"] .toggle').click()
    assert not page.locator('tr[data-path="training/activations/saved"]').is_visible()


def test_filter_finds_by_stack(page: Any) -> None:
    rows = page.locator("#allocation-table tbody tr:visible")
    before = rows.count()
    page.fill("#filter", "chunked_logprob loss")
    assert 0 < rows.count() < before
    sizes = sum(int(row.get_attribute("data-bytes")) for row in rows.all())
    assert page.locator("#nothing").inner_text() == f"“chunked_logprob loss”: {rows.count()} lines, {amount(sizes)}"
    page.fill("#filter", "no such thing")
    assert rows.count() == 0
    page.press("#filter", "Escape")
    assert page.input_value("#filter") == ""
    assert rows.count() == before


def test_a_long_call_in_the_first_change_does_not_widen_a_narrow_page(browser: Any, tmp_path: Path) -> None:
    report, series = sample()
    call = f"torch.cuda.memory._record_memory_history({'max_entries=100000,' * 6})"
    report["headline"] = {"verdict": "It peaks", "cause": "", "places": [], "action": f"Call {call}", "assumed": []}
    write_html(build_document(report, series), tmp_path / "page.html")
    with open_page(browser, tmp_path / "page.html", viewport={"width": 400, "height": 900}) as page:
        assert page.locator(".first").inner_text().startswith("Call torch")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_a_search_marks_boxes_of_the_icicle_and_sums_them(page: Any) -> None:
    page.fill("#filter", "chunked_logprob")
    found = page.locator(".icicle .box.found")
    outer = page.evaluate(
        """() => [...document.querySelectorAll(".box.found")].filter((box) => !box.parentElement.parentElement
        .closest(".node")?.querySelector(":scope > .box").matches(".found")).map((box) => Number(box.dataset.bytes))"""
    )
    assert found.count() >= len(outer) > 0
    boxes = "box" if len(outer) == 1 else "boxes"
    words = page.locator("#icicle-found").inner_text()
    assert words == f"“chunked_logprob”: {len(outer)} {boxes}, {amount(sum(outer))}"
    page.fill("#filter", "")
    assert found.count() == 0
    assert not page.locator("#icicle-found").is_visible()


def test_icicle_zooms_in_and_out(page: Any) -> None:
    weights = page.locator(".icicle .d1 > .box", has_text="Weights").first
    narrow = weights.bounding_box()["width"]
    weights.click()
    assert weights.bounding_box()["width"] > 2 * narrow
    assert not page.locator(".icicle .d1 > .box", has_text="Loss logits").first.is_visible()
    weights.click()
    assert weights.bounding_box()["width"] == pytest.approx(narrow, abs=2)


def test_download_is_the_report(page: Any, tmp_path: Path) -> None:
    with page.expect_download() as download:
        page.click("#download")
    download.value.save_as(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == to_builtins(report_of(sample()[0]))


def picture_is_drawn(page: Any) -> None:
    """The static picture shows the stack at its full height, and every phase."""
    svg = page.locator(".timeline-svg")
    assert svg.is_visible()
    height = svg.bounding_box()["height"]
    assert page.locator(".timeline-svg path.c-weights").bounding_box()["height"] > 0.2 * height
    assert page.locator(".timeline-svg path.c-unattributed").bounding_box()["height"] > 0.3 * height
    assert page.locator(".timeline-svg g rect").count() == 17


def test_reads_without_javascript(browser: Any, file: Path) -> None:
    with open_page(browser, file, java_script_enabled=False) as page:
        picture_is_drawn(page)
        assert page.locator('tr[data-path="kv_cache/kv_cache"]').is_visible()
        assert not page.locator("#filter").is_visible()
        assert page.locator("#panel-total").inner_text() == PEAK + " GiB"


@pytest.mark.parametrize("width", [320, 420, 768])
def test_narrow_screens_do_not_scroll_sideways(browser: Any, file: Path, width: int) -> None:
    with open_page(browser, file, viewport={"width": width, "height": 800}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_no_column_is_clipped_at_400_pixels(browser: Any, file: Path) -> None:
    """The last column of components and the sizes of the device peak were outside the screen."""
    clipped = """() => [...document.querySelectorAll(".scroll")].filter((e) => e.scrollWidth > e.clientWidth)
        .map((e) => e.closest("section").id)"""
    with open_page(browser, file, viewport={"width": 400, "height": 900}) as page:
        assert page.evaluate(clipped) == []


def test_prints_the_static_picture(browser: Any, file: Path, tmp_path: Path) -> None:
    with open_page(browser, file) as page:
        page.emulate_media(media="print")
        picture_is_drawn(page)
        assert not page.locator("#chart").is_visible()
        assert not page.locator("#theme").is_visible()
        assert len(page.pdf(path=str(tmp_path / "page.pdf"))) > 10_000


def test_hostile_names_run_nothing(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    write_html(build_document(*hostile()), path)
    with open_page(browser, path) as page:
        page.on("dialog", lambda dialog: pytest.fail(dialog.message))
        assert page.problems == []
        assert page.requested == [path.as_uri()]
        assert page.locator("h1").inner_text().startswith("script>")
        page.locator("#chart").focus()
        page.keyboard.press("Home")
        page.keyboard.press("p")
        assert page.problems == []


def test_focus_is_seen_on_every_stop_of_the_keyboard(page: Any) -> None:
    stops = []
    for _ in range(12):
        page.keyboard.press("Tab")
        stops.append(
            page.evaluate(
                """() => { const e = document.activeElement, s = getComputedStyle(e);
                const seen = s.outlineStyle !== "none" && parseFloat(s.outlineWidth) > 0;
                return [e.id || e.textContent.slice(0, 20), seen]; }"""
            )
        )
    assert len({name for name, _ in stops}) > 8
    assert [name for name, seen in stops if not seen] == []


@pytest.mark.parametrize("kind", ["trace", "empty", "one_event", "no_timeline"])
def test_unusual_runs_open_too(browser: Any, tmp_path: Path, kind: str) -> None:
    report, series = sample("trace" if kind != "no_timeline" else "cuda")
    shown: dict[str, Any] | None = series
    if kind == "no_timeline":
        shown = None
    if kind in ("empty", "one_event"):
        n_points = 1
        shown = {
            "instant": series["instant"][:n_points],
            "time_us": series["time_us"][:n_points],
            "phase_spans": [],
            "categories": {c: [MIB if kind == "one_event" else 0] for c in series["categories"]},
            "reserved": None,
            "peak_point": 0,
        }
    path = tmp_path / "page.html"
    write_html(build_document(report, shown), path)
    with open_page(browser, path) as page:
        assert page.problems == []
        assert page.locator("#peak-gib").inner_text() == gib(report["peak"]["allocated_bytes"])


def test_a_simulated_runs_timeline_counts_events(browser: Any, tmp_path: Path) -> None:
    """Its instants are whole numbers of events: in the panel, along the axis and in the address."""
    report, series = sample("simulated")
    path = tmp_path / "page.html"
    write_html(build_document(report, series), path)
    clock = series["time_us"]
    with open_page(browser, path) as page:
        where = page.locator("#panel-where").inner_text()
        assert where.startswith(f"event {clock[series['peak_point']] - clock[0]} ·")
        page.locator('[data-choice="axis"][data-value="time"]').click()
        assert page.evaluate("document.getElementById('chart').layout.xaxis.range[1]") == clock[-1] - clock[0]
        page.locator("#chart").focus()
        page.keyboard.press("ArrowLeft")
        moved = page.locator("#panel-where").inner_text()
        event = moved.split()[1]
        assert 0 < int(event) <= clock[-1] - clock[0]
        assert page.evaluate("location.hash").removeprefix("#at=").split(".")[0] == event
        page.goto("about:blank")
        page.goto(f"{path.as_uri()}#at={event}")
        page.wait_for_selector("html[data-charts=yes]", state="attached")
        assert page.locator("#panel-where").inner_text().split()[1] == event


def shown_categories(page: Any) -> set[str]:
    """The categories that the chart, the tables and the icicle show: the same in all three."""
    rows = {
        row.get_attribute("data-category")
        for row in page.locator("#components tr.level1").all()
        if row.evaluate("r => getComputedStyle(r).display !== 'none'")
    }
    boxes = {
        node.get_attribute("data-category")
        for node in page.locator(".icicle .d1").all()
        if node.evaluate("n => getComputedStyle(n).display !== 'none'")
    }
    drawn = set(page.evaluate("document.getElementById('chart').data.filter(d => d.stackgroup).map(d => d.meta)"))
    listed = {row.get_attribute("data-category") for row in page.locator("#allocation-table tbody tr:visible").all()}
    assert boxes <= drawn
    assert rows - {"kv_cache", "loss_logits", "temporaries"} <= drawn
    assert listed <= drawn
    return drawn


def test_the_legend_isolates_and_hides_categories_everywhere(page: Any) -> None:
    everything = shown_categories(page)
    page.click('.legend [data-category="loss_logits"] .only')
    page.wait_for_timeout(200)
    assert shown_categories(page) == {"loss_logits"}
    assert page.locator("#showing").inner_text().startswith("Only Loss logits")
    assert page.url.endswith("#only=loss_logits")
    assert drawn_peak(page) == pytest.approx(2440 / 1024)
    assert page.locator("#panel-total").inner_text() == "2.38 GiB"
    page.click('.legend [data-category="loss_logits"] .only')
    assert shown_categories(page) == everything
    page.click('.legend [data-category="weights"] .hide')
    page.wait_for_timeout(200)
    assert shown_categories(page) == everything - {"weights"}
    assert page.url.endswith("#hide=weights")
    page.click("#showing button")
    assert shown_categories(page) == everything
    assert "#" not in page.url
    assert page.problems == []


def test_the_row_of_unattributed_bytes_is_hidden_with_them(page: Any) -> None:
    row = page.locator('#components tr[data-path="unattributed"]')
    assert row.is_visible()
    page.click('.legend [data-category="unattributed"] .hide')
    assert not row.is_visible()
    assert page.locator('#components tr[data-path="total"]').is_visible()
    page.click("#showing button")
    assert row.is_visible()
    page.click('.legend [data-category="loss_logits"] .only')
    assert not row.is_visible()
    page.click("#showing button")


def test_what_changes_the_chart_draws_it_once(page: Any) -> None:
    """Hiding a category while a part of the run is shown, and another width of the window."""
    page.click("[data-value=peak]")
    page.evaluate(
        "window.draws = 0; document.getElementById('chart').on('plotly_afterplot', () => { window.draws++; })"
    )
    page.click('.legend [data-category="weights"] .hide')
    page.wait_for_timeout(300)
    assert page.evaluate("window.draws") == 1
    page.click("#showing button")
    page.wait_for_timeout(300)
    assert page.evaluate("window.draws") == 2
    page.set_viewport_size({"width": 1100, "height": 900})
    page.wait_for_timeout(600)
    assert page.evaluate("window.draws") == 3
    assert page.evaluate("document.querySelector('#chart .main-svg').clientWidth") == page.evaluate(
        "document.getElementById('chart').clientWidth"
    )
    page.set_viewport_size({"width": 1360, "height": 900})
    page.wait_for_timeout(300)


def test_frames_of_c_plus_plus_are_pale(browser: Any, tmp_path: Path) -> None:
    report, series = sample()
    stack = ["/src/cuda.cpp:31 at::empty", "/usr/lib/libc.so.6:0 main", ":0 ??", "lib/x.o:7 f", "train.py:31 main"]
    blocks = report["peak"]["allocations"]
    report["peak"]["allocations"] = [{**blocks[0], "stack": stack}, *blocks[1:]]
    report["peak"].pop("largest", None)
    path = tmp_path / "native.html"
    write_html(build_document(report, series), path)
    with open_page(browser, path) as page:
        line = page.locator("#allocation-table details", has_text="at::empty")
        line.locator("summary").first.click()
        assert line.locator("pre.own").inner_text() == "train.py:31 main"
        line.locator(".rest summary").click()
        pale = line.locator(".whole span.native").all_inner_texts()
        assert [frame.strip() for frame in pale] == stack[:4]


def test_a_panel_row_a_box_and_a_table_row_open_the_same_stack(page: Any) -> None:
    frames = next(a["stack"] for a in sample()[0]["peak"]["allocations"] if a["category"] == "loss_logits")
    whole = "\n".join(frames)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for opener in ("#panel-largest .plain-button", ".icicle .box[data-open]"):
        page.locator(opener, has_text="1.19 GiB").first.click()
        assert page.locator("dialog .whole").text_content() == whole
        page.click("dialog .copy")
        page.wait_for_timeout(100)
        assert page.evaluate("navigator.clipboard.readText()") == whole
        page.keyboard.press("Escape")
        assert not page.locator("dialog").is_visible()
    details = page.locator("#allocation-table details", has_text="chunked_logprob").first
    details.locator("summary").first.click()
    details.locator(".whole").wait_for(state="attached")
    assert details.locator(".whole").text_content() == whole
    assert violations(page) == []


def test_the_address_brings_back_instant_filter_and_category(browser: Any, file: Path, page: Any) -> None:
    page.locator("#chart").focus()
    page.keyboard.press("Home")
    for _ in range(7):
        page.keyboard.press("]")
    page.fill("#filter", "chunked")
    page.click('.legend [data-category="weights"] .hide')
    held = panel(page)
    assert held[0] == "At this moment"
    address = page.url.partition("#")[2]
    with browser.new_context() as context:
        other = context.new_page()
        other.goto(file.as_uri() + "#" + address)
        other.wait_for_selector("html[data-charts=yes]", state="attached")
        assert panel(other) == held
        assert other.locator("#filter").input_value() == "chunked"
        assert other.locator("#allocation-table tbody tr:visible").count() == 2
        assert "weights" not in shown_categories(other)


def test_an_empty_search_says_so(page: Any) -> None:
    page.fill("#filter", "no such thing")
    assert page.locator("#nothing").inner_text() == "No allocation matches “no such thing”."
    page.fill("#filter", "")
    assert not page.locator("#nothing").is_visible()


def test_the_icicle_is_one_stop_of_the_keyboard_and_writes_only_what_fits(page: Any) -> None:
    assert page.locator('.icicle .box[tabindex="0"]').count() == 1
    page.locator('.icicle .box[tabindex="0"]').focus()
    focused = "document.activeElement.querySelector('.label').textContent"
    page.keyboard.press("ArrowDown")
    assert page.evaluate(focused) == "Weights"
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused) == "Loss logits"
    page.keyboard.press("ArrowDown")
    assert page.evaluate(focused) == "ada/train.py:31 main"
    page.keyboard.press("ArrowDown")
    assert page.evaluate(focused) == "trainer/grpo_trainer.py:1790 _compute_loss"
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    assert page.evaluate(focused) == "Loss logits"
    # A label that does not fit ends in an ellipsis and is never dropped; a size is whole or left out.
    overflowing = """() => Array.from(document.querySelectorAll(".icicle .box"))
        .filter(box => box.offsetParent).flatMap(box => [box.querySelector(".label"), box.querySelector("b")])
        .filter(e => e.className === "label" ? !e.textContent : e.scrollWidth > e.clientWidth + 1)
        .map(e => e.textContent)"""
    for width in (1360, 420):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(150)
        assert page.evaluate(overflowing) == []
    page.set_viewport_size({"width": 1360, "height": 900})


def test_commands_to_paste_are_copied(page: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#reproduce .copy").first.click()
    page.wait_for_timeout(100)
    assert page.evaluate("navigator.clipboard.readText()").startswith("memprof report ")


def test_what_is_guessed_looks_guessed_and_is_listed_by_one_click(page: Any) -> None:
    blocks = sample()[0]["peak"]["allocations"]
    held = sum(block["bytes"] for block in blocks if block["evidence"] in ("lifetime", "shape"))
    link = page.locator(".facts [data-filter=inferred]")
    assert link.inner_text() == "could be temporaries"
    assert in_gib(page.locator(".facts .value").last.inner_text()) == pytest.approx(held / 2**30, abs=0.01)
    hatched = page.locator("#summary .bar .seg.guess")
    assert hatched.count() == 2
    assert "gradient" in hatched.first.evaluate("e => getComputedStyle(e).backgroundImage")
    link.click()
    rows = page.locator("#allocation-table tbody tr:visible")
    assert rows.count() == 3
    assert all("inferred" in row.inner_text() for row in rows.all())
    rows.last.locator("summary").click()
    assert "could also be temporaries" in rows.last.inner_text()
