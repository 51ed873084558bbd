"""*What would lower the peak* in words and on the page; and the panel's allocations away from the peak."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from memprof.reports.document.advice import advice_basis, advice_words, whole_step
from memprof.reports.html.report import render_html, write_html
from memprof.reports.renderers import draw

from tests.report.plain import headline_of, ranked
from tests.reports.html.browser import CHROMIUM, chromium, open_page, violations
from tests.reports.sample import MIB, sample
from tests.reports.typed import build_document, report_of

GIB = 2**30


def _entry(action: str, gib: float, **more: Any) -> dict[str, Any]:
    return {
        "id": action.split()[0].lower(), "action": action, "setting": f"{action.split()[0].lower()}=True",
        "saves_bytes": int(gib * GIB), "costs": "Slower.", "exact": False, "basis": "estimated", "peak": "allocated",
        "peak_after_bytes": int((6.78 - gib) * GIB), "toll": 4, **more,
    }  # fmt: skip


def _report(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The sample on a card that it nearly fills, its advice in the order in which it is written."""
    report = {**sample()[0], "capacity": {"bytes": 9 * GIB, "from": "option"}, **more}
    return {**report, "advice": ranked(entries, report.get("oom"))}


def test_what_keeps_the_gradients_goes_first_unless_it_saves_little() -> None:
    adapter = _entry("Train an adapter", 4.0)
    kept = _entry("Turn checkpointing on", 2.0, exact=True, toll=1)
    action = headline_of(_report(adapter, kept))["action"]
    assert action.startswith("Try first: turn checkpointing on. It saves 2.00")
    little = _entry("Turn checkpointing on", 1.0, exact=True, toll=1)
    assert "train an adapter" in headline_of(_report(adapter, little))["action"]
    dear = _entry("Move things to the host", 2.2, exact=True, toll=2)
    assert "turn checkpointing on" in headline_of(_report(adapter, dear, kept))["action"]
    assert headline_of(_report())["action"] == ""
    assert "It saves 92.2 MiB (" in headline_of(_report(_entry("Turn checkpointing on", 0.09)))["action"]


def test_idle_memory_goes_first_only_where_it_would_have_saved_the_run() -> None:
    idle = _entry("Let segments grow", 3.0, exact=True, toll=0, peak="device")
    other = _entry("Turn checkpointing on", 2.0, exact=True, toll=1)
    assert "turn checkpointing on" in headline_of(_report(idle, other))["action"]
    oom = {"requested_bytes": 1, "device_free_bytes": 0, "phase": "forward", "step": 1, "stack": []}
    saved = _report(idle, other, oom={**oom, "fits_defragmented": True})
    assert "let segments grow" in headline_of(saved)["action"]
    assert "lowers reserved memory only, by up to 3.00 GiB" in advice_words(report_of(saved).advice[0])


def test_after_a_failed_step_savings_say_what_they_count_from() -> None:
    """The peak is 6.78 GiB; the step still had 2 GiB to make, and a saving counts from both."""
    needed = sample()[0]["peak"]["active_bytes"] + 2 * GIB
    oom = {
        "requested_bytes": GIB, "device_free_bytes": 0, "phase": "optimizer_step", "step": 1, "stack": [],
        "fits_defragmented": False,
        "ahead": {
            "still": {"optimizer_state": 2 * GIB}, "moment": "optimizer_step", "short_bytes": GIB,
            "available_bytes": None,
            "needed_bytes": needed,
        },
    }  # fmt: skip
    entry = _entry("Keep moments in 8 bits", 3.0, peak_after_bytes=needed - 3 * GIB)
    report = _report(entry, _entry("Halve the batch", 0.5), oom=oom)
    found = report_of(report)
    assert [whole_step(change, found) for change in found.advice] == [needed, None]
    action = headline_of(report)["action"]
    assert "It saves 3.00 GiB of the 8.78 GiB that the step needs in all (an estimate)." in action
    assert advice_basis(found).endswith("counted from the 8.78 GiB that the step needs in all")
    page = render_html(build_document(_report(entry, oom=oom)))
    assert "leaves 5.78 GiB of 8.78 GiB" in page
    alone = report_of(_report(entry))
    assert whole_step(alone.advice[0], alone) is None


def test_a_peak_that_moves_is_said() -> None:
    moved = report_of(_report(_entry("Halve the batch", 1.0, moves_to="generate"))).advice[0]
    assert "It saves no more because the next highest peak is in generate, at 5.78 GiB." in advice_words(moved)


def test_the_simulators_own_error_is_said() -> None:
    entry = _entry("Halve the batch", 1.0, basis="simulated")
    unchanged = {"measured_bytes": 1000, "simulated_bytes": 1012, "assumed": []}
    assert "1.2% above what was measured" in advice_basis(report_of(_report(entry, unchanged=unchanged)))


_TOGETHER = {
    "gpu": "24GB", "total_bytes": 24 * 10**9, "fits": True, "before_bytes": 40 * GIB, "after_bytes": 20 * GIB,
    "shift_bytes": 0, "margin": 0.03, "phase": "backward", "settings": {},
    "sentence": "2 changes make it fit: 20.00 GiB.",
    "changes": [
        {"id": "a", "action": "A", "setting": "a=1", "costs": "", "exact": True},
        {"id": "b", "action": "B", "setting": "b=2", "costs": "", "exact": True},
    ],
}  # fmt: skip


def test_the_terminal_says_what_to_paste() -> None:
    report = _report(_entry("Halve the batch", 1.0, exact=True), combination=_TOGETHER)
    for width in (60, 80, 120):
        shown = draw("advise", build_document(report), width=width)
        assert max(map(len, shown.split("\n"))) <= width
        assert "2 changes make it fit" in shown
        assert "  a=1\n  b=2" in shown
        assert re.search(r"1\.00 GiB\s+Halve the batch", shown)
        assert "halve=True" in shown


def test_the_page_shows_the_first_ones_and_folds_the_rest() -> None:
    page = render_html(build_document(_report(*[_entry(f"Change{i} it", 3.0 - i / 4) for i in range(7)])))
    assert "3 more that save less" in page
    assert page.index("Change3 it") < page.index("more that save less") < page.index("Change4 it")
    assert 'href="#advice"' in page


def _elsewhere() -> dict[str, Any]:
    """A cache of 300 MiB that only lives during the second generation, and is not alive at the peak."""
    report, _ = sample()
    span = [p for p in report["phases"] if p["phase"] == "generate"][1]
    first = report["peak"]["allocations"][0]
    return {
        **first, "address": 77, "bytes": 300 * MIB, "category": "kv_cache", "detail": "keys", "name": "the cache",
        "phase": "generate", "born_us": span["start_us"], "died_us": span["end_us"],
    }  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here: make browser")
    report, series = sample()
    report["capacity"] = {"bytes": 9 * GIB, "from": "option"}
    report["advice"] = [_entry(f"Change{i} it", 3.0 - i / 4, exact=i % 2 == 0) for i in range(6)]
    report["combination"] = _TOGETHER
    path = tmp_path_factory.mktemp("advice") / "report.html"
    write_html(build_document(report, series, None, None, [_elsewhere()]), path)
    with chromium() as browser, open_page(browser, path) as opened:
        yield opened


@pytest.mark.browser
def test_advice_is_read_without_fault(page: Any) -> None:
    assert page.problems == []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert violations(page) == []
    assert page.locator("#advice li:visible").count() == 4
    page.locator("#advice details summary").click()
    assert page.locator("#advice li:visible").count() == 6
    assert "Try first: change0 it. It saves 3.00 GiB" in page.locator("#summary .first").inner_text()


@pytest.mark.browser
def test_the_panel_knows_what_is_alive_away_from_the_peak(page: Any) -> None:
    largest = page.locator("#panel-largest")
    assert "the cache" not in largest.inner_text()  # the cursor stands at the peak
    page.locator("#chart").focus()
    shown = {}
    page.keyboard.press("Home")
    for _ in range(40):
        page.keyboard.press("]")
        where = page.locator("#panel-where").inner_text()
        shown[where.split(" · ")[-1]] = "the cache" in largest.inner_text()
    assert shown["Generate, step 2"]
    assert not shown["Generate, step 1"]
    assert not any(alive for where, alive in shown.items() if where != "Generate, step 2")
    page.keyboard.press("p")
    assert "the cache" not in largest.inner_text()
    assert page.locator("#panel-largest-title").inner_text() == "Largest alive"
