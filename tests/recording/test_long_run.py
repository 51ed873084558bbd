"""A long run stays as small as a short one (benchmarks/recording/long_run.py is the long one)."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import torch

from benchmarks.recording.long_run import train
from memprof.recording.cuda.history import CudaHistory
from memprof.recording.phases import PhaseLog
from memprof.recording.recorder import DeviceInfo
from memprof.recording.session import Session
from tests.recording.fake_cuda import Allocator


def test_counters_only(tmp_path: Path) -> None:
    rows = train(60, tmp_path)
    assert [row["step"] for row in rows] == list(range(6, 61, 6))
    # Nothing of a row is kept: 752 bytes, of which the test's own rows hold 256. An object a step would be 1,500.
    assert rows[-1]["held_bytes"] - rows[1]["held_bytes"] < 1280
    # Lines are written by time, so 60 fast steps may share one.
    assert rows[-1]["file_bytes"] > 0
    assert (rows[-1]["file_bytes"] - rows[0]["file_bytes"]) / 54 < 400


def test_a_session_that_never_ends_keeps_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA one session runs all along: phases, counters, steps and samples are bounded."""
    monkeypatch.setattr("memprof.recording.session._KEEP", 500)  # of 20,000: the filling takes that much less
    allocator = Allocator()
    session = Session(CudaHistory(torch.device("cuda", 0), max_entries=100, backend=allocator), config={"a": 1})
    card = DeviceInfo(0, "cuda", "stand-in", None)  # there is no driver to ask
    session.recorder.device = lambda: card  # type: ignore[method-assign]
    session.phases = PhaseLog(session.recorder.now_us, keep=500)
    session.start()

    def steps(first: int, last: int) -> int:
        for step in range(first, last):
            session.set_step(step)
            mark = session.enter_phase("backward")
            assert mark is not None, session.guard.failure
            session.exit_phase(mark)
        allocator.calls = []  # the stand-in's own notes
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        filled = steps(0, 700)  # more than are kept
        assert steps(700, 2_700) - filled < 32 * 1024
    finally:
        tracemalloc.stop()
        session.stop()
    assert session.guard.failure is None
    assert len(session._counters) == session._counters.maxlen
