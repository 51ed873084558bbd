"""The allocations that are drawn one by one: never more than the categories hold, and the largest among them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from memprof.reports.document.build import document_of

from memprof.analysis.analysis import Analysis, analyze
from memprof.vocabulary import Category
from tests.synthetic import SnapshotBuilder, frame

MIB = 1 << 20


def check(analysis: Analysis, most: int, most_groups: int) -> None:
    found = analysis.individual(most, most_groups)
    codes = np.array([group.category.code for group in found.groups])[found.group]
    for instant in np.linspace(0, analysis.timeline.n_events, 7).astype(int).tolist():
        alive = (found.begin < instant) & (instant <= found.end)
        whole = analysis.breakdown(instant).categories
        for category in Category:
            drawn = int(found.size[alive & (codes == category.code)].sum())
            assert 0 <= drawn <= whole[category]
            if len(found.group) == found.count:
                assert drawn == whole[category]
    assert len(found.group) <= min(most, found.count)
    assert len(found.groups) <= most_groups
    assert sum(group.count for group in found.groups) == len(found.group)


@pytest.fixture
def build() -> SnapshotBuilder:
    made = SnapshotBuilder()
    made.ghost(8 * MIB)
    brief = made.alloc(512 * MIB, "brief")
    made.free(brief)
    for _ in range(20):
        made.free(made.alloc(MIB, "tiny"))
    made.alloc(64 * MIB, "long")
    return made


def test_all_of_a_small_recording_is_drawn(build: SnapshotBuilder, tmp_path: Path) -> None:
    analysis = analyze(build.save(tmp_path / "run.pickle"))
    check(analysis, 1500, 400)
    found = analysis.individual()
    assert len(found.group) == found.count == 23
    assert found.begin[0] == -1  # the one from before the recording


def test_what_fills_the_peak_is_drawn_however_briefly_it_lived(build: SnapshotBuilder, tmp_path: Path) -> None:
    found = analyze(build.save(tmp_path / "run.pickle")).individual(3, 3)
    assert 512 * MIB in found.size.tolist()


def test_a_shared_snapshot_is_never_overdrawn(shared: Path) -> None:
    analysis = analyze(shared / "snapshots" / "resnet50-pytorchblog-t22.pickle")
    check(analysis, 300, 60)
    check(analysis, 1500, 400)


def test_a_redacted_document_hides_where_they_were_made(tmp_path: Path) -> None:
    build = SnapshotBuilder()
    build.alloc(64 * MIB, "long")
    for event in build.events:
        event["frames"] = [frame("long", "/home/ada/secret/train.py")]
    analysis = analyze(build.save(tmp_path / "run.pickle"))
    document = document_of(analysis, redact=True)
    assert document.individuals is not None
    assert not [f for row in document.individuals.rows for f in row.group.stack if "ada" in f]
