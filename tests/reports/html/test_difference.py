"""The icicle of a comparison: what grew and what shrank, by call site."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from memprof.reports.document.model import Node
from memprof.reports.html.compare import write_comparison
from memprof.reports.html.views.difference import Changed, difference_of, signed

from memprof.units import amount
from tests.reports.compared import sample_comparison
from tests.reports.html.browser import CHROMIUM, chromium, open_page, violations
from tests.reports.typed import build_comparison


def tree(**sites: int) -> Node:
    """A category with a box for each ``file_line_function``."""
    boxes = tuple(
        Node("{}.py:{} {}".format(*name.split("_")), "weights", size, (Node("tensor", "weights", size),))
        for name, size in sites.items()
    )
    total = sum(sites.values())
    return Node("Peak", "", total, (Node("Weights", "weights", total, boxes),))


def boxes_of(node: Changed) -> Iterator[Changed]:
    yield node
    for child in node.children:
        yield from boxes_of(child)


def test_one_function_belongs_together_whatever_its_line() -> None:
    found = difference_of(tree(a_1_f=100, b_2_g=50, c_3_h=7), tree(a_9_f=130, b_2_g=20, c_3_h=7))
    (weights,) = found.children
    assert {(box.label, box.net) for box in weights.children} == {("a.py:1→9 f", 30), ("b.py:2 g", -30)}
    assert (found.net, found.grown, found.shrunk) == (0, 30, 30)


def test_every_box_adds_up() -> None:
    documents = [document for document in sample_comparison()[1] if document]
    found = difference_of(documents[0].icicle, documents[1].icicle)
    for box in boxes_of(found):
        assert box.net == box.grown - box.shrunk
        assert not box.children or box.gross == sum(child.gross for child in box.children)
    assert found.net == documents[1].report.peak.active_bytes - documents[0].report.peak.active_bytes


@pytest.mark.parametrize(("n_bytes", "words"), [(0, "±0"), (1 << 20, "+1.00 MiB"), (-(1 << 30), "−1.00 GiB")])
def test_a_difference_has_its_sign(n_bytes: int, words: str) -> None:
    assert signed(n_bytes) == words


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: make browser")
def test_boxes_say_their_difference_and_zoom_by_keyboard_and_mouse(tmp_path: Path) -> None:
    path = tmp_path / "compare.html"
    write_comparison(build_comparison(*sample_comparison()), path)
    with chromium() as browser, open_page(browser, path) as page:
        boxes = page.locator("#difference .d1 > .box")
        shrunk = boxes.filter(has_text="Loss logits")
        assert re.search(r"Loss logits, −[\d.]+ GiB: [\d.]+ GiB before", shrunk.get_attribute("title"))
        assert "shrunk-box" in shrunk.get_attribute("class")
        page.locator("#difference .d0 > .box").focus()
        page.keyboard.press("ArrowDown")
        assert page.evaluate("document.activeElement.title").startswith("Loss logits, −")
        page.keyboard.press("Enter")
        assert page.locator("#difference .d1[data-zoomed]").count() == 1
        page.locator("#difference .d0 > .box").click()
        first, other = (document.report.peak.active_bytes for document in sample_comparison()[1] if document)
        assert amount(abs(other - first)) in page.locator("#difference p").first.inner_text()
        assert violations(page) == []
        assert page.problems == []
