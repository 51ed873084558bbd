"""ZeRO as it is modelled holds what arithmetic says of each stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memprof.simulate.recorder.host_memory import PinnedHostAllocator
from memprof.vocabulary import Category, Evidence
from tests.simulate.test_closed_forms import LORA, PARAMETERS, ROPE, H, R, V, _analysis, _requested, _sizes

WORLD, BUCKET = 4, 20_000
ALIGNED = -(-PARAMETERS // (2 * WORLD)) * 2 * WORLD
PART = ALIGNED // WORLD
SHARES = sum(-(-n // WORLD) for n in _sizes())


@pytest.fixture(scope="module")
def zero(settings_for: Callable[..., Any]) -> Callable[..., Any]:
    def run(stage: int, **changes: Any) -> Any:
        return _analysis(
            settings_for(
                generation="none", gpus=WORLD, sharding=f"zero{stage}", reduce_bucket_size=BUCKET,
                optim="adamw_torch_fused", **changes,
            )
        )  # fmt: skip

    return run


def _at_the_step(found: Any, category: str) -> int:
    rows = found.explain("phase:optimizer_step", category=category, top=10_000)
    return sum(r.requested_bytes for r in rows if r.evidence == "owner")


def _sizes_of(found: Any, category: Category) -> set[int]:
    """Sizes of everything known, by its owner, to be of a category."""
    mine = (found.attribution.category == category.code) & (found.attribution.evidence == Evidence.OWNER.code)
    return {int(n) for n in np.unique(found.timeline.requested[mine])}


@pytest.mark.parametrize("stage", [1, 2])
def test_weights_are_whole_and_states_are_divided(zero: Callable[..., Any], stage: int) -> None:
    found = zero(stage)
    assert _at_the_step(found, "weights") == 2 * ALIGNED + ROPE
    assert _requested(found, "optimizer_state") == 3 * 4 * PART + 4  # master weights, two moments, a counter
    assert _requested(found, "communication") == 2 * BUCKET


def test_stage_1_keeps_all_gradients_until_the_step(zero: Callable[..., Any]) -> None:
    assert _requested(zero(1), "gradients") == 2 * PARAMETERS + 2 * PART


def test_stage_2_keeps_this_ranks(zero: Callable[..., Any]) -> None:
    assert _requested(zero(2), "gradients") == (2 + 2 + 4) * PART  # kept, flattened, and in float32


def test_stage_3_divides_everything(zero: Callable[..., Any]) -> None:
    found = zero(
        3, stage3_param_persistence_threshold=0, stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=0, beta=0.1
    )
    whole = 2 * V * H  # type: ignore[operator]  # the embedding or the head, one at a time
    assert _requested(found, "weights") == 2 * SHARES + ROPE + whole
    assert _requested(found, "reference_model") == 2 * SHARES + ROPE + whole
    assert _requested(found, "optimizer_state") == 3 * 4 * SHARES + 4
    assert _requested(found, "gradients") == (2 + 2 + 4) * SHARES
    assert 2 * BUCKET in _sizes_of(found, Category.COMMUNICATION)


def test_stage_3_keeps_what_comes_again_soon(zero: Callable[..., Any]) -> None:
    found = zero(3, stage3_param_persistence_threshold=0, stage3_prefetch_bucket_size=0)
    assert _requested(found, "weights") == 2 * SHARES + ROPE + 2 * PARAMETERS  # all within DeepSpeed's distance


def test_stage_3_gathers_ahead(zero: Callable[..., Any]) -> None:
    sizes = {}
    for ahead in (0, 30_000):
        limits = {"stage3_prefetch_bucket_size": ahead, "stage3_max_reuse_distance": 0}
        sizes[ahead] = _sizes_of(zero(3, stage3_param_persistence_threshold=0, **limits), Category.COMMUNICATION)
    assert sizes[0] == {2 * BUCKET}
    assert len(sizes[30_000]) > 1  # several gathered together are copied apart


def test_small_parameters_stay_whole(zero: Callable[..., Any]) -> None:
    assert _at_the_step(zero(3), "weights") == 2 * SHARES + ROPE + 2 * PARAMETERS  # all are below 100 000 here


def test_an_adapter_under_stage_2(zero: Callable[..., Any]) -> None:
    found = zero(2, lora_r=R)
    part = -(-LORA // (2 * WORLD)) * 2
    assert _requested(found, "optimizer_state") == 3 * 4 * part + 4
    assert _requested(found, "gradients") == (2 + 2 + 4) * part


def test_stage_3_is_whole_while_it_generates(settings_for: Callable[..., Any]) -> None:
    found = _analysis(
        settings_for(
            gpus=WORLD, sharding="zero3", reduce_bucket_size=BUCKET, stage3_param_persistence_threshold=0,
            stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=0, optim="none",
        )
    )  # fmt: skip
    weights = [r for r in found.explain("phase:generate", category="weights", top=1000) if r.evidence == "owner"]
    assert sum(r.requested_bytes for r in weights) == 2 * SHARES + ROPE + 2 * PARAMETERS
    assert _sizes_of(found, Category.COMMUNICATION) == {2 * BUCKET}


def test_it_says_that_it_is_modelled(zero: Callable[..., Any]) -> None:
    assert any("modelled, not executed" in note for note in zero(2).to_dict()["notes"])


@pytest.mark.parametrize(
    ("sharding", "taken"), [pytest.param("zero2", "bfloat16", marks=pytest.mark.heavy), ("fsdp2", "float32")]
)
def test_a_dtype_that_is_not_taken_is_said(settings_for: Callable[..., Any], sharding: str, taken: str) -> None:
    settings = settings_for(generation="none", gpus=WORLD, sharding=sharding, dtype="float16")
    said = f"dtype float16 is not taken: {sharding} trains weights in {taken}."
    assert said in _analysis(settings).to_dict()["notes"]
    assert "is not taken" not in str(_analysis(settings.with_(dtype=taken)).to_dict()["notes"])


def test_pinned_memory_is_held_in_powers_of_two() -> None:
    pool = PinnedHostAllocator()
    for _ in range(2):
        pool.malloc(160 * 2**20)
    assert (pool.requested, pool.held) == (320 * 2**20, 512 * 2**20)
    pool.free(160 * 2**20)
    pool.malloc(200 * 2**20)  # fits the one that came free
    assert (pool.requested_peak, pool.held) == (360 * 2**20, 512 * 2**20)
