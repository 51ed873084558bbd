"""Blocks without a history: what their sizes may say, and what they may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof import analyze
from tests.synthetic import SnapshotBuilder, frame

KIB = 2**10
LAYERS, COPIES = 6, 4


def four_copies(stack: list[str]) -> SnapshotBuilder:
    """Four equal copies of a small model's sizes, all with one stack (or none)."""
    run = SnapshotBuilder()
    sizes = [5000 * KIB, 3000 * KIB, *([2 * KIB] * (2 * LAYERS + 1)), *([1024 * KIB, 4096 * KIB] * LAYERS)]
    for _ in range(COPIES):
        for size in sizes:
            run.live[run.ghost(size)]["frames"] = [frame(name) for name in stack]
    return run


def test_four_copies_without_stacks_read_as_a_training_state_with_alternatives(tmp_path: Path) -> None:
    analysis = analyze(four_copies([]).save(tmp_path / "state.pickle"))
    total = analysis.peak.active_bytes
    assert analysis.peak.categories["optimizer_state"] == pytest.approx(total / 2)
    assert analysis.peak.categories["gradients"] == pytest.approx(total / 4)
    assert all(a["alternatives"] for a in analysis.explain("peak", category="optimizer_state"))


def test_blocks_made_in_one_place_are_no_copies_of_each_other(tmp_path: Path) -> None:
    analysis = analyze(four_copies(["allocate", "init_weights", "main"]).save(tmp_path / "state.pickle"))
    assert analysis.peak.categories["weights"] == analysis.peak.active_bytes
