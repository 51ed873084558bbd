"""The generator of large files: one long, consistent history."""

from __future__ import annotations

import copy
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.reading.large_files import measure, replay, write_replay
from memprof._native import scanner
from memprof.snapshot import snapshot_from_raw
from memprof.snapshot.rows import scan_file
from memprof.snapshot.unpickle import read_plain
from memprof.snapshot.writer import save_snapshot
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
    if _completes_an_older_free(raw["device_traces"][0]):
        return  # nor can one that was asked for before the recording
    made = replay(raw, events)
    many = build_timeline(snapshot_from_raw(made), 0)
    assert many.n_events >= min(events, once.n_events)
    assert not any("contradicts" in note or "were never freed" in note for note in many.notes)
    assert many.active[-1] == once.active[-1]
    length = sum(e["action"] not in ("oom", "snapshot") for e in raw["device_traces"][0])
    if events < length:
        return  # the newest events alone
    assert many.max_requested == once.max_requested
    # Every round reserves what the recorded one did, event by event. Between two, where what a round did is undone,
    # segments are given back before others are taken.
    period = len(replay(raw, length + 1)["device_traces"][0]) - length
    recorded = _reserved(replay(raw, length))
    reserved = _reserved(made)
    assert len(recorded) == length
    assert len(reserved) % period == length % period
    for start in range(0, len(reserved), period):
        assert reserved[start : start + length] == recorded


def _completes_an_older_free(trace: list[dict[str, Any]]) -> bool:
    asked: set[int] = set()
    for event in trace:
        if event["action"] == "free_requested":
            asked.add(event["addr"])
        elif event["action"] == "free_completed":
            if event["addr"] not in asked:
                return True
            asked.discard(event["addr"])
    return False


def _reserved(raw: dict[str, Any]) -> list[int]:
    """Return the bytes reserved after each event."""
    found = build_timeline(snapshot_from_raw(raw), 0).reserved
    assert found is not None
    return found.tolist()[1:]


@settings(max_examples=25, deadline=None)
@given(programs(), st.integers(3, 9), st.booleans())
def test_what_is_written_a_round_at_a_time_is_the_replay(program: Program, rounds: int, annotated: bool) -> None:
    raw = program.raw(0)
    trace = raw["device_traces"][0]
    assume(len(trace) >= 2)
    for number, event in enumerate(trace):  # as torch's: microseconds since 1970, metadata of its own
        event["time_us"] = 1_760_000_000_000_000 + 3 * number
        if annotated:
            event["user_metadata"] = f"step {number}"
    many = rounds * 2 * len(trace)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "many.pickle")
        with patch("benchmarks.reading.large_files.save_snapshot", wraps=save_snapshot) as plainly:
            write_replay(raw, many, out)
        assert not plainly.called
        assert read_plain(out) == replay(raw, many)
        if scanner() is not None:
            assert scan_file(out) is not None


def test_measuring() -> None:
    cpu, wall, peak = measure([sys.executable, "-c", "x = b'1' * 50_000_000; sum(range(10**6))"])
    assert 0 < cpu < 30
    assert 0 < wall < 60
    # Linux counts what this process held when it started the other.
    assert 50_000_000 < peak < 500_000_000 + 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RuntimeError, match="Oops"):
        measure([sys.executable, "-c", "raise ValueError('Oops')"])
