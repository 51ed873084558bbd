"""A colocated engine's share of the card, awake and asleep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memprof.errors import UsageError

GPU = "8GB"


def _peaks(settings: Any) -> dict[str, int]:
    from memprof.config.gpus import find_gpu
    from memprof.simulate.evaluate import evaluate

    outcome = evaluate(settings, find_gpu(GPU))
    peaks: dict[str, int] = {}
    for breakdown in outcome.analysis.phases:
        peaks[breakdown.phase] = max(peaks.get(breakdown.phase, 0), breakdown.categories.get("inference_engine", 0))
    return peaks


def test_the_engine_takes_its_share_all_along(settings_for: Callable[..., Any]) -> None:
    peaks = _peaks(settings_for(generation="vllm", vllm_gpu_memory_utilization=0.5))
    assert peaks["backward"] == peaks["generate"] == pytest.approx(4e9, abs=2**21)
    assert "old_logprobs" in peaks  # TRL corrects for what the engine sampled with


def test_asleep_it_takes_nothing(settings_for: Callable[..., Any]) -> None:
    peaks = _peaks(settings_for(generation="vllm", vllm_gpu_memory_utilization=0.5, vllm_enable_sleep_mode=True))
    assert peaks["generate"] == pytest.approx(4e9, abs=2**21)
    assert peaks["backward"] == 0


def test_each_trainers_own_default_decides_whether_it_sleeps(settings_for: Callable[..., Any]) -> None:
    engine = {"generation": "vllm", "vllm_gpu_memory_utilization": 0.5, "dtype": "bfloat16"}
    lean, trl = (settings_for(recipe=recipe, **engine) for recipe in ("lean", "trl"))
    assert lean.engine_sleeps
    assert not trl.engine_sleeps
    assert _peaks(lean) == _peaks(lean.with_(vllm_enable_sleep_mode=True))
    assert _peaks(lean)["backward"] == 0
    assert not lean.with_(vllm_enable_sleep_mode=False).engine_sleeps
    assert lean.with_(park_weights=True).park_weights
    from memprof.config.to_trl_config import grpo_arguments

    assert [grpo_arguments(s)["vllm_enable_sleep_mode"] for s in (lean, trl)] == [True, False]


def test_the_card_must_be_known(settings_for: Callable[..., Any]) -> None:
    from memprof.simulate.run import simulate_settings

    with pytest.raises(UsageError, match="requires --gpu"):
        simulate_settings(settings_for(generation="vllm"))


@pytest.mark.parametrize("lora", [None, 3], ids=["full", "LoRA"])
def test_parked_weights_are_on_the_host_while_it_is_awake(settings_for: Callable[..., Any], lora: int | None) -> None:
    """Weights and optimizer state leave the card, and cross PCIe twice; training's peak stays."""
    from memprof.config.gpus import find_gpu
    from memprof.simulate.evaluate import evaluate
    from memprof.simulate.generation.vllm_engine import NEVER_RUN

    same = settings_for(
        recipe="lean", dtype="bfloat16", lora_r=lora, generation="vllm", vllm_gpu_memory_utilization=0.5,
        vllm_enable_sleep_mode=True,
    )  # fmt: skip
    beside, parked = (evaluate(same.with_(park_weights=parks), find_gpu("RTX 4090")) for parks in (False, True))
    held = {}
    for outcome, name in ((beside, "beside"), (parked, "parked")):
        awake = [one for one in outcome.analysis.phases if one.phase == "generate"][-1]
        held[name] = awake.categories
    on_card = sum(held["beside"][name] for name in ("weights", "adapters", "optimizer_state"))
    left = sum(held["parked"][name] for name in ("weights", "adapters", "optimizer_state"))
    assert left < 0.02 * on_card  # buffers
    assert held["parked"]["inference_engine"] == held["beside"]["inference_engine"] > 0
    assert parked.analysis.peak.allocated_bytes < beside.analysis.peak.allocated_bytes
    training = [
        max(one.allocated_bytes for one in outcome.analysis.phases if one.phase == "backward")
        for outcome in (beside, parked)
    ]
    assert training[0] == training[1]
    pinned = [outcome.raw["memprof"]["host"]["pinned_bytes"] for outcome in (beside, parked)]
    assert pinned[1] - pinned[0] >= on_card - left
    seconds = [outcome.raw["memprof"]["estimated_time"]["phases"]["generate"] for outcome in (beside, parked)]
    crossing = 2 * (on_card - left) / (32e9 * 0.8)
    assert seconds[1] - seconds[0] == pytest.approx(crossing, rel=0.1)
    assert NEVER_RUN in parked.raw["memprof"]["notes"]
    assert NEVER_RUN not in beside.raw["memprof"]["notes"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recipe": "trl"}, "add --recipe lean"),
        ({"generation": "hf"}, "add --generation vllm --vllm-enable-sleep-mode"),
        ({"vllm_enable_sleep_mode": False}, "add --generation vllm --vllm-enable-sleep-mode"),
        ({"gpus": 2, "sharding": "zero2"}, "drop --sharding"),
        ({"lora_r": 8, "load_in_4bit": True}, "drop --load-in-4bit"),
    ],
)
def test_parking_needs_an_engine_that_sleeps(
    settings_for: Callable[..., Any], changes: dict[str, Any], words: str
) -> None:
    right = {"recipe": "lean", "generation": "vllm", "vllm_enable_sleep_mode": True, "dtype": "bfloat16"}
    assert settings_for(**right, park_weights=True).park_weights
    with pytest.raises(UsageError, match=words):
        settings_for(**{**right, "park_weights": True, **changes})
