"""Attribution of recordings whose kind was once read wrongly: what each category holds at the peak, in MiB."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.analysis.analysis import analyze

MIB = 1 << 20
RIGHT: dict[str, dict[str, float]] = {
    "min_loop_tied_head.pickle.gz": {"weights": 18.6, "gradients": 42.6, "loss_logits": 5.9, "temporaries": 0},
    "min_loop_unfrozen_reference.pickle.gz": {"weights": 13.4, "reference_model": 13.4, "gradients": 13.4},
    "min_loop_passes_in_one_backward.pickle.gz": {"weights": 11.2, "gradients": 24.4, "activation_gradients": 0},
    "min_no_stacks.pickle": {"weights": 100, "activations": 296, "optimizer_state": 200, "temporaries": 0},
    "min_old_graph_called_weights.pickle": {"weights": 150, "activations": 608},
    "min_state_made_in_init_inplace.pickle": {"weights": 100, "optimizer_state": 200, "activations": 296},
}


@pytest.mark.parametrize("name", RIGHT)
def test_the_peak_is_what_the_program_made(shared: Path, name: str) -> None:
    path = shared / "cases4" / name
    if not path.exists():
        pytest.skip("the recordings are not here")
    found = analyze(path).peak.categories
    assert {c: round(found[c] / MIB, 1) for c in found if c in RIGHT[name]} == RIGHT[name]


@pytest.mark.parametrize("name", ["min_state_made_in_init_inplace.pickle", "min_foreach_scratch_advice.pickle"])
def test_layers_that_all_have_gradients_are_no_two_copies(shared: Path, name: str) -> None:
    path = shared / "cases4" / name
    if not path.exists():
        pytest.skip("the recordings are not here")
    assert "two_copies" not in {found.kind for found in analyze(path).report.peak.findings}
