"""Breakdowns, curves, series and the report over snapshots whose every byte the test chose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memprof import Analysis, analyze, load_snapshot
from memprof.analysis.curves import build_series, category_curve
from memprof.errors import InputError, UsageError
from tests.synthetic import SnapshotBuilder

MIB = 2**20


def owned(builder: SnapshotBuilder, owners: list[tuple[int, str]], **extra: Any) -> dict[str, Any]:
    """A memprof key with these owners, known at the end of the recording."""
    rows = [[address, builder.time_us, category, None, None] for address, category in owners]
    return {"schema": "memprof.snapshot/1", "kind": "cuda", "owners": rows, **extra}


@pytest.fixture
def trained(tmp_path: Path) -> Analysis:
    """Weights from before the recording, a passing activation, then gradients that stay."""
    run = SnapshotBuilder()
    weights = run.ghost(100 * MIB)
    run.alloc(3 * MIB + 1, "forward")
    activation = run.alloc(50 * MIB, "forward")
    run.free(activation)
    gradients = run.alloc(20 * MIB, "backward")
    extra = owned(run, [(weights, "weights"), (gradients, "gradients")])
    return analyze(load_snapshot(run.save(tmp_path / "run.pickle", extra)))


def test_the_peak_is_the_highest_moment_and_adds_up(trained: Analysis) -> None:
    peak = trained.peak
    assert peak.allocated_bytes == peak.active_bytes == (153 * MIB + 512)
    assert peak.requested_bytes == 153 * MIB + 1
    assert peak.rounding_bytes == 511
    assert peak.categories["weights"] == 100 * MIB
    assert peak.categories["gradients"] == 0
    assert sum(peak.categories.values()) == sum(peak.evidence.values()) == peak.groups["total"] == peak.active_bytes
    peak.self_check()


def test_a_category_has_a_peak_of_its_own(trained: Analysis) -> None:
    assert trained.own_peaks["gradients"] == 20 * MIB
    assert trained.own_peaks["weights"] == 100 * MIB
    assert trained.group_own_peaks["total"] == trained.peak.active_bytes


def test_device_peak_is_made_of_growth(trained: Analysis) -> None:
    peak = trained.device_peak
    assert peak is not None
    assert sum(growth.bytes for growth in peak.grown_by) == peak.reserved_bytes
    assert peak.reserved_bytes == 100 * MIB + 4 * MIB + 50 * MIB + 20 * MIB


def test_reserved_is_active_and_the_three_kinds_of_idle(trained: Analysis) -> None:
    for instant in range(trained.timeline.n_events + 1):
        trained.breakdown(instant).self_check()


def test_self_check_sees_a_lost_byte(trained: Analysis) -> None:
    trained.timeline.active[trained.timeline.peak_instant] += 1
    with pytest.raises(AssertionError, match="categories"):
        trained.peak.self_check()


def test_pending_free_is_active_but_not_allocated(tmp_path: Path) -> None:
    run = SnapshotBuilder()
    first = run.alloc(8 * MIB, "forward")
    run.free(first, pending=True)
    run.alloc(2 * MIB, "forward")
    run.complete(first)
    analysis = analyze(load_snapshot(run.save(tmp_path / "run.pickle")))
    at = analysis.breakdown(5)
    assert (at.active_bytes, at.allocated_bytes, at.pending_free_bytes) == (10 * MIB, 2 * MIB, 8 * MIB)
    assert at.requested_bytes == 2 * MIB
    at.self_check()


def test_explain_finds_a_block_by_an_address_inside_it(trained: Analysis) -> None:
    weights = trained.explain("peak", category="weights")
    assert [a.bytes for a in weights] == [100 * MIB]
    assert trained.explain("peak", address=weights[0].address + 4096) == weights
    assert len(trained.explain("peak", top=2)) == 2
    sizes = [a.bytes for a in trained.explain("peak")]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == trained.peak.active_bytes


@pytest.mark.parametrize("at", ["summit", "phase:nowhere", "12", "-3"])
def test_explain_refuses_an_instant_that_is_not_there(trained: Analysis, at: str) -> None:
    with pytest.raises(UsageError):
        trained.explain(at)


def test_the_report_holds_what_the_analysis_says(trained: Analysis) -> None:
    report = trained.to_dict(allocations=None)
    assert report["schema"] == "memprof.report/1"
    assert report["peak"]["active_bytes"] == sum(a["bytes"] for a in report["peak"]["allocations"])
    assert sum(g["bytes"] for g in report["device_peak"]["grown_by"]) == report["device_peak"]["reserved_bytes"]
    assert report["max_requested_bytes"] == 153 * MIB + 1


def test_a_recording_of_nothing_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"empty\.pickle"):
        analyze(SnapshotBuilder().save(tmp_path / "empty.pickle"))


def test_one_event_is_enough(tmp_path: Path) -> None:
    run = SnapshotBuilder()
    run.alloc(1, "forward")
    report = analyze(run.save(tmp_path / "one.pickle")).to_dict()
    assert report["peak"]["active_bytes"] == 512
    assert report["peak"]["requested_bytes"] == 1


@st.composite
def runs(draw: st.DrawFn) -> SnapshotBuilder:
    """Any order of ghosts, allocations, pending and completed frees."""
    run = SnapshotBuilder()
    live = [run.ghost(size) for size in draw(st.lists(st.integers(1, 40 * MIB), max_size=3))]
    pending: list[int] = []
    for kind in draw(st.lists(st.sampled_from(["alloc", "free", "pend", "complete"]), max_size=40)):
        if kind == "alloc":
            function = draw(st.sampled_from(["forward", "step", "generate"]))
            live.append(run.alloc(draw(st.integers(1, 40 * MIB)), function))
        elif kind == "complete" and pending:
            run.complete(pending.pop())
        elif kind in ("free", "pend") and live:
            address = live.pop(draw(st.integers(0, len(live) - 1)))
            run.free(address, pending=kind == "pend")
            if kind == "pend":
                pending.append(address)
    for address in pending:
        run.complete(address)
    return run


@settings(max_examples=60, deadline=None)
@given(run=runs())
def test_every_instant_of_any_run_is_conserved(run: SnapshotBuilder, tmp_path_factory: pytest.TempPathFactory) -> None:
    assume(run.segments)
    path = run.save(tmp_path_factory.mktemp("run") / "run.pickle")
    analysis = analyze(load_snapshot(path))
    line = analysis.timeline
    everything = np.ones(len(line), dtype=bool)
    assert np.array_equal(category_curve(line, everything), line.active)
    for instant in range(0, line.n_events + 1, 7):
        analysis.breakdown(instant).self_check()
    assert sum(v for k, v in analysis.to_dict()["peak"]["groups"].items() if k != "total") == analysis.peak.active_bytes


def test_thinned_series_keep_the_peak_and_the_sum(tmp_path: Path) -> None:
    run = SnapshotBuilder()
    rng = np.random.default_rng(0)
    live: list[int] = []
    for _ in range(3000):
        if live and rng.random() < 0.5:
            run.free(live.pop(int(rng.integers(len(live)))))
        else:
            live.append(run.alloc(int(rng.integers(1, 8 * MIB)), "forward"))
    analysis = analyze(load_snapshot(run.save(tmp_path / "run.pickle")))
    series = build_series(analysis.timeline, analysis.attribution, max_points=200)
    total = np.sum(list(series.categories.values()), axis=0)
    assert len(series.instants) < 400
    assert total[series.peak_point] == total.max() == analysis.timeline.active.max()
    assert np.array_equal(total, analysis.timeline.active[series.instants])


def test_a_phase_that_only_frees_began_with_its_highest(tmp_path: Path) -> None:
    run = SnapshotBuilder()
    kept, passing = run.alloc(2 * MIB, "forward"), run.alloc(8 * MIB, "forward")
    start = run.time_us + 1
    run.free(passing)
    run.free(kept)
    phases = [{"phase": "optimizer_step", "start_us": start, "end_us": run.time_us, "step": 1}]
    extra = {"schema": "memprof.snapshot/1", "kind": "cuda", "phases": phases}
    report = analyze(run.save(tmp_path / "run.pickle", extra)).to_dict()
    (phase,) = (p for p in report["phases"] if p["phase"] == "optimizer_step")
    assert phase["peak_allocated_bytes"] == 10 * MIB
    assert phase["peak_bytes"] == sum(phase["categories"].values())
