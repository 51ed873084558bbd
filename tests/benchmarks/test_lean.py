"""The comparison of two runs' logs in benchmarks/lean.py."""

from __future__ import annotations

from typing import Any

from benchmarks.lean import COMPARED, difference


def step(**logged: float) -> dict[str, Any]:
    return {**dict.fromkeys(COMPARED), **logged}


def test_the_largest_distance_is_of_the_largest_value() -> None:
    runs = {"trl": {"steps": [step(loss=0.5), step(loss=-2.0)]}, "lean": {"steps": [step(loss=0.6), step(loss=-2.0)]}}
    found = difference(runs)
    assert found.keys() == {"loss"}  # what neither run logged is not compared
    assert abs(found["loss"] - 0.05) < 1e-12


def test_what_only_one_run_logged_is_no_agreement() -> None:
    runs = {"trl": {"steps": [step(loss=0.5, kl=0.1)]}, "lean": {"steps": [step(loss=0.5)]}}
    assert difference(runs) == {"loss": 0.0, "kl": float("inf")}
