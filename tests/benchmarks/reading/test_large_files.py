"""The generator of large files: one long, consistent history."""

from __future__ import annotations

import copy
import resource
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.reading.large_files import measure, replay
from memprof.snapshot import snapshot_from_raw
from memprof.timeline.timeline import build_timeline
from tests.snapshot.programs import Program, programs


@settings(max_examples=40, deadline=None)
@given(programs(), st.floats(0, 0.5), st.integers(1, 400))
def test_a_replayed_run_is_consistent(program: Program, late: float, events: int) -> None:
    raw = program.raw(int(late * len(program.events)))
    if not any(e["action"] == "alloc" for e in raw["device_traces"][0]) or program.settings.expandable_segments:
        return  # pages of expandable segments are not undone
    once = build_timeline(snapshot_from_raw(copy.deepcopy(raw)), 0)
    if once.active[-1] != once.allocated[-1]:
        return  # a free that never completes cannot be undone either
    made = replay(raw, events)
    many = build_timeline(snapshot_from_raw(made), 0)
    assert many.n_events >= min(events, once.n_events)
    assert not any("contradicts" in note or "were never freed" in note for note in many.notes)
    assert many.active[-1] == once.active[-1]
    if many.n_events >= once.n_events:
        assert many.max_requested == once.max_requested
        assert many.reserved is not None
        assert once.reserved is not None
        assert many.reserved.max() == once.reserved.max()
        assert many.reserved.min() <= once.reserved.min()  # between two rounds segments are given back and taken


def test_measuring() -> None:
    cpu, wall, peak = measure([sys.executable, "-c", "x = b'1' * 50_000_000; sum(range(10**6))"])
    assert 0 < cpu < 30
    assert 0 < wall < 60
    # Linux counts what this process held when it started the other.
    assert 50_000_000 < peak < 500_000_000 + 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RuntimeError, match="Oops"):
        measure([sys.executable, "-c", "raise ValueError('Oops')"])
