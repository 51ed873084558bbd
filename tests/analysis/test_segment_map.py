"""The map of segments: every byte of reserved memory is a block or free, and the parts add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memprof.reports.document.build import document_of
from memprof.reports.html.views.segment_map import (
    figures_words,
    map_drawing,
    map_drawings,
    moment_words,
    pool_words,
    pools_table,
    segment_section,
)

from memprof.analysis.allocations.segment_map import SegmentMap
from memprof.analysis.analysis import Analysis, analyze
from memprof.errors import InputError, UsageError
from tests.synthetic import SnapshotBuilder

MIB = 1 << 20


def check(found: SegmentMap) -> None:
    layout = found.layout
    assert found.idle.total + found.pending_free_bytes == found.reserved_bytes - found.allocated_bytes
    assert int(layout.size.sum()) + found.not_mapped_bytes == found.reserved_bytes
    # What is drawn covers each segment exactly.
    free = np.bincount(layout.free_segment, layout.free_size, len(layout)).astype(np.int64)
    assert (layout.used + free == layout.size).all()
    if not (found.not_mapped_bytes or found.outside_bytes or found.not_in_history_bytes):
        assert int(free.sum()) == found.idle.total
        assert sum(pool.free_bytes for pool in found.pools) == found.idle.private_pools
    for most in (10, 100_000):
        drawn = np.array(map_drawing(found, most).rectangles, np.int64).reshape(-1, 5)
        assert int(drawn[:, 2].sum()) == int(layout.size.sum())
        assert int(drawn[:, 4].sum()) == len(layout.rows) + len(layout.free_size)


def test_the_parts_of_every_shared_snapshot_add_up(shared: Path) -> None:
    seen = 0
    for path in sorted((shared / "snapshots").glob("*.pickle")):
        try:
            analysis = analyze(path)
        except InputError:
            continue
        for found in analysis.segment_maps:
            check(found)
            seen += 1
    assert seen > 40


def _block(address: int, size: int, state: str = "active_allocated") -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": []}


def _segment(address: int, total: int, blocks: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    used = sum(b["size"] for b in blocks if b["state"] != "inactive")
    return {
        "device": 0, "address": address, "total_size": total, "allocated_size": used, "active_size": used,
        "requested_size": used, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False,
        "frames": [], "blocks": blocks, **more,
    }  # fmt: skip


@pytest.fixture
def dump(tmp_path: Path) -> Analysis:
    """A segment in use, an empty one, a private pool's, and two stretches of an expandable segment."""
    import pickle

    base = 0x7F00_0000_0000
    segments = [
        _segment(base, 20 * MIB, [_block(base + 4 * MIB, 6 * MIB), _block(base + 13 * MIB, 5 * MIB)]),
        _segment(base + 64 * MIB, 10 * MIB, []),
        _segment(base + 128 * MIB, 8 * MIB, [_block(base + 128 * MIB, 2 * MIB)], segment_pool_id=(0, 3), stream=7),
        _segment(base + 1024 * MIB, 20 * MIB, [_block(base + 1024 * MIB, 20 * MIB)], is_expandable=True),
        _segment(base + 1104 * MIB, 20 * MIB, [_block(base + 1104 * MIB, 20 * MIB)], is_expandable=True),
    ]
    raw = {"segments": segments, "device_traces": [[]], "allocator_settings": {}, "external_annotations": []}
    path = tmp_path / "dump.pickle"
    path.write_bytes(pickle.dumps(raw))
    return analyze(path)


def test_a_dump_has_one_map_with_every_kind_of_idle_memory(dump: Analysis) -> None:
    (found,) = dump.segment_maps
    check(found)
    assert found.moments == ("dump",)
    assert (found.idle.cached, found.idle.inactive_split, found.idle.private_pools) == (10 * MIB, 9 * MIB, 6 * MIB)
    assert found.largest_free_bytes == 10 * MIB
    assert found.unmapped_bytes == 60 * MIB
    assert [(p.identifier, p.bytes, p.free_bytes) for p in found.pools] == [((0, 3), 8 * MIB, 6 * MIB)]
    words = figures_words(found)
    assert "78.0 MiB reserved in 5 segments, 53.0 MiB allocated" in words
    assert "6.00 MiB of 8.00 MiB in (0, 3)" in words
    labels = [row.label for row in map_drawing(found, 1000).rows]
    assert any("expandable" in label for label in labels)
    assert any("private pool (0, 3), of a MemPool or shared by CUDA graphs, stream 7" in label for label in labels)


def test_the_idle_memory_of_each_pool_adds_up(dump: Analysis) -> None:
    (found,) = dump.segment_maps
    rows = pools_table(found)
    assert rows is not None
    assert [(line.cells[0], *line.cells[2:]) for line in rows.lines] == [
        ("default pool, stream 0, expandable", 40 * MIB, 0, 0, 0),
        ("default pool, stream 0", 30 * MIB, 10 * MIB, 9 * MIB, 10 * MIB),
        ("private pool (0, 3), of a MemPool or shared by CUDA graphs, stream 7", 8 * MIB, 0, 6 * MIB, 6 * MIB),
    ]
    assert sum(line.cells[3] + line.cells[4] for line in rows.lines) == found.idle.total
    assert pool_words((2, 0)) == "private pool (2, 0), of one CUDA graph"


def test_the_page_of_a_dump_has_the_map_in_the_timelines_place(dump: Analysis) -> None:
    document = document_of(dump)
    assert document.timeline is None
    section = segment_section(document.segments, map_drawings(document.segments))
    assert section is not None
    assert "<svg" in section
    assert "Idle in private pools" in section
    assert "data-map" not in section  # one moment: nothing to choose


def test_moments_at_one_instant_are_one_map(tmp_path: Path) -> None:
    build = SnapshotBuilder()
    first = build.alloc(4 * MIB, "forward")
    build.alloc(8 * MIB, "forward")
    build.free(first)
    maps = analyze(build.save(tmp_path / "run.pickle")).segment_maps
    assert [found.moments for found in maps] == [("peak",), ("device-peak",), ("end",)] or "end" in maps[-1].moments
    assert len({found.instant for found in maps}) == len(maps)
    for found in maps:
        check(found)
    assert maps[-1].idle.cached == 4 * MIB
    assert moment_words(("peak", "phase:backward")) == "Allocated peak, peak of backward"


def test_any_instant_can_be_mapped_but_not_on_a_cpu(dump: Analysis) -> None:
    assert dump.segments_at("peak").reserved_bytes == 78 * MIB
    with pytest.raises(UsageError, match="outside the recording"):
        dump.segments_at("12")
