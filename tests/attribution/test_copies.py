"""A dump without history: what a stack says a forward made is no weight."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.analysis.analysis import analyze


def test_what_a_forward_made_in_a_dump_without_history_is_no_weight(shared: Path) -> None:
    """Attention's outputs, kept by a guidance of Stable Diffusion, keep their stacks; its weights take 2 GiB."""
    report = analyze(shared / "snapshots" / "sd-guidance-legacy-list-t22.pickle").to_dict()
    held = report["peak"]["categories"]
    assert held["weights"] / 2**30 == pytest.approx(2.02, abs=0.01)
    assert held["activations"] / 2**30 == pytest.approx(1.09, abs=0.01)
    assert [place["share"] for place in report["headline"]["places"]] == [pytest.approx(1.0, abs=0.01)]
