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


def test_what_a_forward_keeps_to_the_end_is_not_called_transient(shared: Path) -> None:
    """The recording is one forward with gradients; its layers' activations are alive when it ends."""
    report = analyze(shared / "snapshots" / "cs336-2.7b-fwd-ctx512-t26.pickle").to_dict()
    details = report["peak"]["details"]["activations"]
    assert details["kept"] > 0.9 * report["peak"]["categories"]["activations"]
    held = [a for a in report["peak"]["largest"] if a["detail"] == "transient"]
    assert all(a["died_us"] is not None for a in held)
