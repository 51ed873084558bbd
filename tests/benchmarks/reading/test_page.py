"""The page benchmark's verdicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.reading.page import _summary

OPENED = [{"paint_ms": 300.0, "ready_ms": r, "cpu_ms": r / 2, "zoom_ms": 50.0} for r in (1400.0, 690.0, 1100.0)]


@pytest.mark.parametrize(
    ("name", "size", "fits"),
    [("200,000 events", 2_999_999, True), ("200,000 events", 3_000_000, False), ("1,000,000 events", 2_000_000, True)],
)
def test_limits(tmp_path: Path, name: str, size: int, fits: bool) -> None:
    page = tmp_path / "page.html"
    page.write_bytes(b"x" * size)
    found = _summary(name, page, OPENED)
    assert (found["bytes"], found["bytes_ok"]) == (size, fits)
    assert (found["median_ready_ms"], found["best_ready_ms"], found["ready_ok"]) == (1100, 690, True)
    assert found["best_cpu_ms"] == 345
    assert not _summary(name, page, OPENED[:1])["ready_ok"]
