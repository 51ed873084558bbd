"""Other architectures go through, and what cannot ends in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memprof.errors import InputError, MemprofError
from tests.simulate.conftest import TINY

MOE = {**TINY, "model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}


def _simulate(settings: Any) -> dict[str, Any]:
    from memprof.simulate.run import simulate_settings

    return simulate_settings(settings, stacks=False)


def _traced(settings: Any) -> Any:
    from memprof.simulate.run import simulate_settings

    return simulate_settings(settings)["device_traces"][0]


def _settings(make: Callable[..., Any], folder: Path, config: dict[str, Any], **changes: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    return make(model=str(folder), generation="none", **changes)


def test_a_mixture_of_experts_is_executed(settings_for: Callable[..., Any], tmp_path: Path) -> None:
    raw = _simulate(_settings(settings_for, tmp_path, MOE, dtype="bfloat16"))
    assert any("grouped_mm" in event["user_metadata"] for event in raw["device_traces"][0])


@pytest.mark.heavy  # trainers of two releases
def test_losses_of_old_releases_have_no_part_of_the_router(settings_for: Callable[..., Any], tmp_path: Path) -> None:
    settings = _settings(settings_for, tmp_path, MOE, dtype="bfloat16", beta=0)

    def functions(**changes: Any) -> str:
        return str([f["name"] for e in _traced(settings.with_(**changes)) for f in e["frames"]])

    assert "load_balancing_loss_func" in functions()
    assert all("load_balancing" not in functions(recipe=recipe) for recipe in ("trl-full-logits", "trl-0.14"))
    assert "load_balancing" not in functions(trainer="rloo", recipe="trl-full-logits")


def test_what_torch_cannot_fake_is_a_sentence(settings_for: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be simulated with these settings \(.*BF16.*--dtype bfloat16"):
        _simulate(_settings(settings_for, tmp_path, MOE, dtype="float32"))


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_target_modules": ("nothing",)},
        {"lora_target_modules": ("lm_head",)},
        {"recipe": "lean", "tiled_mlp": 8},
    ],
    ids=str,
)
def test_what_peft_or_the_lean_trainer_refuses_says_what_to_change(
    settings_for: Callable[..., Any], tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(MemprofError, match=r"Name other modules with --lora-target-modules\.$|: drop tiled_mlp\.$"):
        _simulate(_settings(settings_for, tmp_path, MOE, dtype="bfloat16", lora_r=4, **changes))


def test_an_unknown_architecture_is_a_sentence(settings_for: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="transformers cannot use this config"):
        _simulate(_settings(settings_for, tmp_path, {"model_type": "nobody_knows_this"}))
