"""One rank of several: what it holds is its share, and what it needs to talk to the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.simulate.test_closed_forms import PARAMETERS, ROPE, L, _analysis, _requested, _sizes


def test_a_rank_holds_its_share(settings_for: Callable[..., Any]) -> None:
    world = 4
    found = _analysis(settings_for(generation="none", sharding="fsdp2", gpus=world, optim="adamw_torch_fused"))
    weights, state = _requested(found, "weights"), _requested(found, "optimizer_state")
    assert weights >= 4 * PARAMETERS // world
    assert state == pytest.approx(2 * 4 * PARAMETERS / world, rel=0.01)


def test_the_whole_model_is_never_on_one_rank(settings_for: Callable[..., Any]) -> None:
    found = _analysis(settings_for(generation="none", sharding="fsdp2", gpus=4, optim="adamw_torch_fused"))
    load = next(b for b in found.phases if b.phase == "load")
    assert load.allocated_bytes < 4 * PARAMETERS


def test_buckets_of_ddp_are_as_large_as_the_gradients(settings_for: Callable[..., Any]) -> None:
    found = _analysis(settings_for(generation="none", gpus=2))
    assert _requested(found, "communication") == 4 * PARAMETERS
    assert _requested(found, "weights") == 4 * PARAMETERS + ROPE
    assert len(_sizes()) == 9 * L + 3


def test_a_rank_may_hold_one_completion_of_a_group(settings_for: Callable[..., Any]) -> None:
    settings = settings_for(generation="none", gpus=4, per_device_train_batch_size=1)
    found = _analysis(settings)
    assert {b.step for b in found.phases if b.phase == "backward"} == {1, 2}
    assert found.peak.allocated_bytes < _analysis(settings_for(generation="none", gpus=4)).peak.allocated_bytes
