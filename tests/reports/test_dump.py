"""A dump without history: its figures are of the dump, no screen calls them a peak's."""

from __future__ import annotations

from pathlib import Path

from memprof.reports.document.build import document_of
from memprof.reports.renderers import draw

from memprof.analysis.analysis import analyze
from tests.synthetic import SnapshotBuilder


def test_a_dump_says_dump_where_a_recording_says_peak(tmp_path: Path) -> None:
    build = SnapshotBuilder()
    for size in (1 << 26, 1 << 25):
        build.ghost(size)
    document = document_of(analyze(build.save(tmp_path / "dump.pickle")))
    for style in ("text", "markdown"):
        drawn = draw("report", document, style)
        tables = drawn[drawn.index("Reserved: ") :]
        assert "At the dump" in tables
        assert "peak" not in tables.lower()
