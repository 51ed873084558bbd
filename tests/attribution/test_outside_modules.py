"""What a forward makes outside modules is a loss where something says so, and a guess elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.analysis.analysis import analyze


@pytest.mark.parametrize("name", ["linear-grad-t24", "linear-nograd-t24"])
def test_what_a_script_makes_before_each_pass_is_its_input(shared: Path, name: str) -> None:
    """Both scripts run ``inputs = torch.randn(...)`` and a layer on it in a loop; they have no loss."""
    own = analyze(shared / "snapshots" / f"{name}.pickle").to_dict()["own_peaks"]
    assert own.get("loss_logits", 0) == 0
    assert own["inputs"] > 180 << 20
