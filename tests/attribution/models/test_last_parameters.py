"""A recording that ends inside the optimizer's step: its last parameters' state is state like the others'."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.analysis.analysis import analyze


def test_the_last_parameters_moments_are_optimizer_state(shared: Path) -> None:
    """Both moments are made a line each, as many bytes of one as of the other; what adam's scratch takes is freed."""
    peak = analyze(shared / "snapshots" / "cs336-2.7b-fullstep-ctx128-t26.pickle").to_dict()["peak"]
    assert peak["categories"]["optimizer_state"] == pytest.approx(2 * peak["categories"]["weights"], rel=0.01)
    assert peak["categories"]["temporaries"] < 0.2 * 2**30


def test_a_step_that_replaces_state_has_two_copies_of_the_weights(shared: Path) -> None:
    held = analyze(shared / "snapshots" / "cs336-medium-train-ctx256-t211.pickle").to_dict()["peak"]["categories"]
    assert held["optimizer_state"] == pytest.approx(2 * held["weights"], rel=0.01)
