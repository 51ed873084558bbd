"""A model that may be there twice is said to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.analysis.analysis import analyze

SAID = "they may be two copies of one model"


@pytest.mark.parametrize(
    ("name", "each"),
    [
        ("flexgen-opt1.3b-a-t20", "2.64 GiB each"),  # OPT-1.3B in 16 bits: 2.45 GiB, and its head once more
        ("flexgen-opt-oom-t20", ""),
        ("cs336-medium-infer-ctx512-t211", ""),
        ("select_n-llama-infer-offload-t21", ""),
        ("sd-guidance-legacy-list-t22", ""),
        ("sketchkv-llama-kvcache-t24", ""),
    ],
)
def test_weights_whose_every_size_is_even_may_be_two_copies(shared: Path, name: str, each: str) -> None:
    notes = " ".join(analyze(shared / "snapshots" / f"{name}.pickle").to_dict()["notes"])
    assert (SAID in notes) is bool(each)
    assert each in notes


def test_what_a_forward_made_in_a_dump_without_history_is_no_weight(shared: Path) -> None:
    """Attention's outputs, kept by a guidance of Stable Diffusion, keep their stacks; its weights take 2 GiB."""
    report = analyze(shared / "snapshots" / "sd-guidance-legacy-list-t22.pickle").to_dict()
    held = report["peak"]["categories"]
    assert held["weights"] / 2**30 == pytest.approx(2.02, abs=0.01)
    assert held["activations"] / 2**30 == pytest.approx(1.09, abs=0.01)
    assert [place["share"] for place in report["headline"]["places"]] == [pytest.approx(1.0, abs=0.01)]
