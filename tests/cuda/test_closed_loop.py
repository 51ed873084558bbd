"""Runs that die live once the advice that is promised to be enough is applied as printed (more: benchmarks.advice)."""

from __future__ import annotations

import sys

import pytest

from benchmarks.advice.closed_loop import CASES, Runs, follow

pytestmark = [pytest.mark.slow, pytest.mark.trl]

# A later step that fails where the state is there; a first optimizer step without room for it.
ROWS = [("full, AdamW, no checkpointing", 0.9, 2), ("full, bf16 weights", 0.7, 1)]


@pytest.fixture(scope="module")
def runs() -> Runs:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMPROF_CUDA_PYTHON", sys.executable)
        return Runs()


@pytest.mark.parametrize(("name", "share", "step"), ROWS, ids=[name for name, _, _ in ROWS])
def test_what_is_promised_to_be_enough_is(runs: Runs, name: str, share: float, step: int) -> None:
    limit = int(share * runs(CASES[name])["reserved_bytes"])
    row = follow(runs, {"run": name, "limit_bytes": limit}, simulate=False)
    assert row is not None, "it lived without advice"
    assert row["step"] == step
    assert row["estimated"]["promised"]
    assert row["estimated"]["lived"], row["estimated"]["error"]
