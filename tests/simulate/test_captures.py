"""A training step of a known shape, simulated, against what a GPU recorded of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.simulate.gpt import Shape, train

pytest.importorskip("torch")


@pytest.mark.slow
@pytest.mark.parametrize(("context", "autocast"), [pytest.param(256, False, marks=pytest.mark.heavy), (1024, True)])
def test_peaks_are_within_two_percent_of_the_capture(shared: Path, context: int, autocast: bool) -> None:
    from memprof.config.gpus import find_gpu
    from memprof.simulate.run import simulate

    seen: dict[str, int] = {}

    def run(session: Any) -> None:
        heap = session.recorder.allocator
        train(Shape(context=context), autocast=autocast, warm_up=3, before=lambda: _reset(heap))
        seen.update(peak=heap.max_requested, reserved=heap.reserved)

    # The capture holds two workspaces of 8 519 680 bytes: a card before compute capability 9.
    simulate(run, stacks=False, gpu=find_gpu("A100-80GB"))
    name = f"cs336-medium-train-ctx{context}-t211.pickle"
    real = json.loads((shared / "snapshots" / "peaks.json").read_text())[name]
    assert seen["peak"] == pytest.approx(real["max_requested_bytes"]["0"], rel=0.02)
    assert seen["reserved"] == pytest.approx(real["reserved_end"], rel=0.02)


def _reset(heap: Any) -> None:
    heap.max_requested = heap.requested
