"""A recording without times: nothing drawn names a time, and the report says that its clock counts events."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from memprof.reports.document.build import document_of
from memprof.reports.renderers import draw

from memprof.analysis.analysis import analyze
from memprof.snapshot.writer import save_snapshot
from tests.report.files import validate
from tests.synthetic import SnapshotBuilder

TIME = re.compile(r"\d (?:µs|ms|s)\b|Time\b")


@pytest.mark.parametrize("timed", [True, False])
def test_no_time_is_drawn_where_none_was_recorded(timed: bool, tmp_path: Path) -> None:
    build = SnapshotBuilder()
    for _ in range(3):
        build.free(build.alloc(1 << 26, "forward"))
        build.alloc(1 << 20, "forward")
    raw = build.raw()
    for event in raw["device_traces"][0] if not timed else ():
        del event["time_us"]
    analysis = analyze(save_snapshot(raw, tmp_path / "run.pickle"))
    report = analysis.to_dict()
    validate(report)
    assert report["source"]["timed"] is timed
    assert any("no clock" in note for note in report["notes"]) is not timed
    document = document_of(analysis)
    for style in ("text", "markdown"):
        drawn = draw("report", document, style)
        assert ("Forward" in drawn, bool(TIME.search(drawn))) == (True, timed)
    assert document.timeline
    assert document.timeline.timed is timed
