"""The comparison of two runs' logs in benchmarks/lean/track.py."""

from __future__ import annotations

from typing import Any

from benchmarks.lean.tables import _length
from benchmarks.lean.track import COMPARED, difference


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


def test_a_longest_length_says_what_is_known_of_the_next() -> None:
    def tried(**fits: bool) -> dict[str, Any]:
        found = [{"length": int(name[1:]), "fits": yes, "phase": "backward"} for name, yes in fits.items()]
        return {"tried": found, "grain": 1024}

    assert _length(tried(n2048=True, n4096=True)) == ["≥ 4,096", "–"]
    assert _length(tried(n2048=True, n3072=False, n8192=False)) == ["2,048", "backward"]
    assert _length(tried(n2048=True, n8192=False)) == ["2,048 (not 8,192)", "backward"]
    assert _length(tried(n2048=False)) == ["< 2,048", "backward"]
