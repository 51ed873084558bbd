"""Peaks that the history lost and the allocator's counters kept: shown, with every byte accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from memprof.reports.document.build import document_of
from memprof.reports.html.report import render_html

from memprof.analysis.analysis import Analysis, analyze
from memprof.recording.cuda.history import CudaHistory
from memprof.recording.recorder import DeviceInfo
from memprof.recording.session import Session
from memprof.recording.trace.tensor_trace import TensorTrace
from tests.recording.fake_cuda import Allocator, started_session
from tests.report.files import validate
from tests.reports.document.drawn import render_terminal

BIG, SMALL = 646_144, 8_192


@pytest.fixture(autouse=True)
def a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaHistory, "other_device", lambda self, i: DeviceInfo(i, "cuda", "Pretend", 24 * 10**9))


def analysed(session: Session, path: Path) -> Analysis:
    session.stop()
    session.write(path)
    return analyze(path)


def check_sums(report: dict[str, Any]) -> None:
    """Hold the report against its schema, and its sums to the byte."""
    validate(report)
    peak = report["peak"]
    assert sum(peak["categories"].values()) == sum(peak["evidence"].values()) == peak["active_bytes"]
    assert peak["groups"]["total"] == peak["active_bytes"] == report["group_own_peaks"]["total"]
    assert peak["active_bytes"] == peak["allocated_bytes"] + peak["pending_free_bytes"]
    assert peak["allocated_bytes"] == peak["requested_bytes"] + peak["rounding_bytes"]
    if peak["reserved_bytes"] is not None:
        idle = peak["cached_bytes"] + peak["inactive_split_bytes"] + peak["private_pool_bytes"]
        assert peak["reserved_bytes"] == peak["active_bytes"] + idle
        device = report["device_peak"]
        assert sum(grown["bytes"] for grown in device["grown_by"]) == device["reserved_bytes"]
    for category, own in report["own_peaks"].items():
        assert own >= peak["categories"][category]
    for phase in report["phases"]:
        assert sum(phase["categories"].values()) == phase["peak_bytes"]


def wrapped(tmp_path: Path) -> Analysis:
    """A step whose peak the ring has lost: its counter says 646,144 bytes, the history 8,192."""
    allocator = Allocator()
    session = started_session(allocator, max_entries=30)
    session.set_step(1)
    mark = session.enter_phase("forward")
    assert mark is not None
    held = allocator.malloc(BIG)
    allocator.free(held)
    session.exit_phase(mark)
    mark = session.enter_phase("backward")
    assert mark is not None
    for _ in range(40):
        allocator.free(allocator.malloc(SMALL))
    session.exit_phase(mark)
    return analysed(session, tmp_path / "wrapped.pickle")


def test_a_ring_that_wrapped_inside_a_step_does_not_lower_the_peak(tmp_path: Path) -> None:
    analysis = wrapped(tmp_path)
    assert analysis.timeline.allocated.max() == SMALL
    analysis.peak.self_check()
    report = analysis.to_dict()
    check_sums(report)
    peak = report["peak"]
    assert (peak["allocated_bytes"], peak["phase"], peak["step"]) == (BIG, "forward", 1)
    seen = BIG - peak["not_in_history_bytes"]
    assert 0 <= seen <= SMALL
    assert peak["categories"]["unattributed"] >= BIG - seen
    assert peak["details"]["unattributed"] == {"not_in_history": BIG - seen}
    (note,) = [n for n in report["notes"] if "not in the history" in n]
    assert "631.00 KiB at the peak, in forward of step 1" in note
    assert "records the last 30" in note
    document = document_of(analysis)
    assert all(check.ok is not False for check in document.checks)
    assert document.summary.peak_bytes == BIG
    assert document.timeline is not None
    assert document.timeline.total[document.timeline.peak_point] == BIG
    for text in (render_terminal(document, 100), render_html(document)):
        assert "Not in the history" in text
        assert "not in the history and count as unattributed" in text


def test_a_peak_between_decoded_tokens_is_the_counters(tmp_path: Path) -> None:
    """A burst inside a gap: the history alone is too low, the phase's own row as well."""
    allocator = Allocator()
    session = started_session(allocator)
    session.set_step(1)
    mark = session.enter_phase("generate")
    assert mark is not None
    cache = allocator.malloc(512 * 1000)
    recorder = session.recorder
    assert isinstance(recorder, CudaHistory)
    for token in range(60):
        recorder.on_token(1)
        allocator.free(allocator.malloc(512 * (28 if token == 40 else 2)))
    assert recorder._gaps
    session.exit_phase(mark)
    allocator.free(cache)
    report = (analysis := analysed(session, tmp_path / "gap.pickle")).to_dict()
    check_sums(report)
    assert analysis.timeline.allocated.max() == 512 * 1002
    assert report["peak"]["allocated_bytes"] == 512 * 1028
    assert report["peak"]["not_in_history_bytes"] in (512 * 26, 512 * 28)
    assert [p["peak_allocated_bytes"] for p in report["phases"] if p["phase"] == "generate"] == [512 * 1028]
    assert [n for n in report["notes"] if "between decoded tokens that were left out" in n]


def test_a_peak_outside_every_phase_is_counted(tmp_path: Path) -> None:
    allocator = Allocator()
    session = started_session(allocator, max_entries=10)
    allocator.free(allocator.malloc(BIG))
    for _ in range(20):
        allocator.free(allocator.malloc(SMALL))
    report = analysed(session, tmp_path / "bare.pickle").to_dict()
    check_sums(report)
    assert (report["peak"]["allocated_bytes"], report["peak"]["phase"]) == (BIG, "other")


def test_what_is_open_at_a_failure_is_counted(tmp_path: Path) -> None:
    """A snapshot written inside a phase, as at an out-of-memory error, knows that phase's peak so far."""
    allocator = Allocator()
    session = started_session(allocator, max_entries=10)
    session.set_step(2)
    assert session.enter_phase("backward") is not None
    allocator.free(allocator.malloc(BIG))
    for _ in range(20):
        allocator.free(allocator.malloc(SMALL))
    session.write(tmp_path / "open.pickle")
    session.stop()
    peak = analyze(tmp_path / "open.pickle").to_dict()["peak"]
    assert (peak["allocated_bytes"], peak["phase"], peak["step"]) == (BIG, "backward", 2)


def test_steps_that_the_history_does_not_touch_do_not_count(tmp_path: Path) -> None:
    allocator = Allocator()
    session = started_session(allocator, max_entries=10)
    for step in (1, 2, 3):
        session.set_step(step)
        mark = session.enter_phase("forward")
        assert mark is not None
        for _ in range(10):
            allocator.free(allocator.malloc(BIG if step == 1 else SMALL))
        session.exit_phase(mark)
    report = analysed(session, tmp_path / "late.pickle").to_dict()
    assert (report["peak"]["allocated_bytes"], report["peak"]["not_in_history_bytes"]) == (SMALL, 0)


def test_a_whole_history_needs_no_counter(tmp_path: Path) -> None:
    """The tensor trace counts and records the same: nothing is missing, and nothing is said."""
    session = Session(TensorTrace(torch.device("cpu")))
    session.start()
    session.set_step(1)
    for _ in range(3):
        outer = session.enter_phase("forward")
        kept = torch.ones(3000)
        inner = session.enter_phase("backward")
        (kept * 2).sum().item()
        session.exit_phase(inner)
        session.exit_phase(outer)
    report = analysed(session, tmp_path / "whole.pickle").to_dict()
    check_sums(report)
    assert report["peak"]["not_in_history_bytes"] == 0
    assert not [n for n in report["notes"] if "not in the history" in n]
    counted = {(p["phase"], p["peak_allocated_bytes"]) for p in report["phases"]}
    assert len(counted) > 1


def test_a_tensor_trace_that_dropped_its_peak_shows_it(tmp_path: Path) -> None:
    session = Session(TensorTrace(torch.device("cpu"), max_entries=20))
    session.start()
    session.set_step(1)
    mark = session.enter_phase("forward")
    torch.ones(1_000_000).sum().item()
    for _ in range(30):
        torch.ones(1000).sum().item()
    session.exit_phase(mark)
    report = analysed(session, tmp_path / "trace.pickle").to_dict()
    check_sums(report)
    assert report["peak"]["allocated_bytes"] >= 4_000_000
    assert report["peak"]["not_in_history_bytes"] > 3_900_000


def test_an_outer_phases_peak_is_its_own_not_the_nested_ones(tmp_path: Path) -> None:
    """Lean training runs backwards piece by piece inside the loss: counter and page say the same of both phases."""
    allocator = Allocator()
    session = started_session(allocator)
    session.set_step(1)
    outer = session.enter_phase("forward")
    assert outer is not None
    for pieces in range(3):
        allocator.free(allocator.malloc(512 * 100))
        inner = session.enter_phase("backward")
        assert inner is not None
        allocator.free(allocator.malloc(512 * (400 + pieces)))
        session.exit_phase(inner)
        allocator.free(allocator.malloc(512 * 150))
    session.exit_phase(outer)
    rows, _ = session.counters_after(0)
    peaks: dict[str, int] = {}
    for row in rows:
        peaks[row.phase] = max(row.peaks.allocated_peak or 0, peaks.get(row.phase, 0))
    assert peaks == {"forward": 512 * 150, "backward": 512 * 402}
    assert session.peak_of_step() == 512 * 402
    whole = session.peaks_since_last()
    assert whole is not None
    assert whole.allocated_peak == 512 * 402
    again = session.peaks_since_last()
    assert again is not None
    assert again.allocated_peak == 0
    shown: dict[str, int] = {}
    for phase in analysed(session, tmp_path / "pieces.pickle").to_dict()["phases"]:
        shown[phase["phase"]] = max(phase["peak_allocated_bytes"], shown.get(phase["phase"], 0))
    assert {p: shown[p] for p in peaks} == peaks
