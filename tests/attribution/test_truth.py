"""Attribution against labelled snapshots, and against other people's real ones (both beside the checkout)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.truth.score import Case, score_case
from memprof.attribution.pipeline import attribute
from memprof.snapshot import load_snapshot
from memprof.timeline.timeline import build_timeline
from memprof.vocabulary import Category

LABELLED = ["r2_full_bf16_tied.normal", "r2_full_bf16_tied.after_load", "r7_nano_loop.normal"]


@pytest.fixture(scope="module", params=LABELLED)
def case(request: pytest.FixtureRequest, shared: Path) -> Case:
    path = shared / "truth" / f"{request.param}.pickle"
    if not path.exists():
        pytest.skip("the labelled snapshots are not here")
    return score_case(path)


def test_nearly_every_byte_is_right_at_the_peak_and_at_every_phase_peak(case: Case) -> None:
    for name, score in case.instants.items():
        assert score.accuracy >= (0.98 if name == "peak" else 0.95), (name, score.worst.most_common(3))
        assert all(recall >= 0.9 for recall in score.recalls().values()), (name, score.recalls())


def test_phases_reach_the_peaks_they_should(case: Case) -> None:
    assert all(case.phase_peaks_found.values()), case.phase_peaks_found


def shares(path: Path) -> dict[str, float]:
    """GiB at the peak by category."""
    snapshot = load_snapshot(path)
    line = build_timeline(snapshot)
    said = attribute(snapshot, line)
    rows = line.alive_at(line.peak_instant)
    return {c.value: float(line.size[rows][said.category[rows] == c.code].sum()) / 2**30 for c in Category}


@pytest.mark.parametrize("name", ["cs336-2.7b-fullstep-ctx128-t26", "cs336-2.7b-fullstep-ctx512-t26"])
def test_a_full_step_holds_the_parameters_four_times(shared: Path, name: str) -> None:
    found = shares(shared / "snapshots" / f"{name}.pickle")
    weights = found["weights"]
    assert weights == pytest.approx(12.8, abs=0.05)
    assert found["gradients"] == pytest.approx(weights, rel=0.02)
    assert found["optimizer_state"] == pytest.approx(2 * weights, rel=0.03)
    assert found["unattributed"] == 0


def test_a_forward_alone_holds_them_once(shared: Path) -> None:
    found = shares(shared / "snapshots" / "cs336-2.7b-fwd-ctx256-amp-t26.pickle")
    assert found["weights"] == pytest.approx(12.8, abs=0.05)
    assert found["optimizer_state"] == found["gradients"] == 0
    assert found["weight_casts"] == pytest.approx(6.4, abs=0.5)
