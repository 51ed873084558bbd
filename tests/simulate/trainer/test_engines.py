"""A colocated engine's share of the card, awake and asleep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memprof.errors import UsageError

GPU = "8GB"


def _peaks(settings: Any) -> dict[str, int]:
    from memprof.config.gpus import find_gpu
    from memprof.simulate.fit import evaluate

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


def test_the_card_must_be_known(settings_for: Callable[..., Any]) -> None:
    from memprof.simulate.run import simulate_settings

    with pytest.raises(UsageError, match="say which one with --gpu"):
        simulate_settings(settings_for(generation="vllm"))
