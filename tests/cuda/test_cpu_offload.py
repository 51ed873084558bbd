"""``park_weights`` on CUDA's own allocator: a card that cannot hold the training and an engine's pool holds each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cuda.emulated import device, run

pytestmark = [pytest.mark.slow, pytest.mark.trl]

MIB = 2**20
#: fp32, 36 MiB of weights: with AdamW's moments 108.
CASE = {"dtype": "float32", "shape": {"hidden_size": 512, "intermediate_size": 1024}}
POOL = 128 * MIB


def told(folder: Path, values: dict[str, int] | None = None, **asked: Any) -> dict[str, Any]:
    given = {"folder": str(folder), "case": CASE, "pool": POOL, **asked}
    found: dict[str, Any] = run("cpu_offload", given, env=device(**(values or {})))
    return found


def test_the_engine_has_the_card_to_itself(tmp_path: Path) -> None:
    found = told(tmp_path, names=["beside", "parked"])
    beside, parked = found["beside"], found["parked"]
    assert beside["error"] is parked["error"] is None
    weights = parked["weights"]
    assert weights > 30 * MIB
    assert parked["parked"] == pytest.approx(3 * weights, rel=0.01)
    assert beside["beside"][-1] > 3 * weights
    assert parked["beside"][-1] < beside["beside"][-1] - 2.98 * weights
    assert parked["logs"] == beside["logs"]
    assert parked["parameters"] == beside["parameters"]


def test_a_card_that_cannot_hold_both(tmp_path: Path) -> None:
    limit = 230 * MIB
    few = {"values_max": 65536, "copy_max": 65536}  # memory is asked for, and no result is looked at
    found = told(tmp_path, few, names=["parked", "beside"], limit=limit)
    assert found["parked"]["error"] is None
    assert "out of memory" in found["beside"]["error"]
