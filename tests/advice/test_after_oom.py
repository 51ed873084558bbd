"""What a step that ran out of memory had still to make, held to arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from memprof.config.model_shape import ModelShape
from memprof.config.settings import Settings
from tests.advice.reports import GIB, MODEL, report
from tests.report.plain import estimated_advice, look_ahead, whole_oom

MIB = 2**20
FULL = Settings(model="m", dtype="bfloat16", optim="adamw_torch", prompt_length=256, completion_length=768)
PARAMETERS = 2 * ModelShape.of(MODEL).parameters  # bytes of one set in bfloat16


def ran_out(settings: Settings | None, phase: str, held: dict[str, int], **oom: Any) -> dict[str, Any]:
    found = report({phase: held}, settings)
    found["oom"] = {
        "requested_bytes": 47 * MIB, "device_free_bytes": 10 * MIB, "phase": phase, "step": 1, "stack": [],
        "allocated_bytes": sum(held.values()), "categories": held, "cached_bytes": 0, "inactive_split_bytes": 60 * MIB,
        "private_pool_bytes": 0, **oom,
    }  # fmt: skip
    return found


def test_a_first_optimizer_step_has_the_rest_of_its_state_to_make() -> None:
    """Both moments are as wide as the gradients; 1.14 GiB of them are there."""
    held = {"weights": GIB, "gradients": GIB, "optimizer_state": round(1.14 * GIB)}
    ahead = look_ahead(ran_out(FULL, "optimizer_step", held))
    assert ahead is not None
    left = 2 * GIB - round(1.14 * GIB)
    assert ahead["still"] == {"optimizer_state": left}
    assert ahead["needed_bytes"] == sum(held.values()) + left
    assert ahead["available_bytes"] == sum(held.values()) + 70 * MIB
    assert ahead["short_bytes"] == left - 70 * MIB


def test_a_later_optimizer_step_has_nothing_ahead() -> None:
    held = {"weights": GIB, "gradients": GIB, "optimizer_state": 2 * GIB, "temporaries": GIB}
    assert look_ahead(ran_out(FULL, "optimizer_step", held)) is None


def test_eight_bit_state_is_two_bytes_a_parameter_and_scales() -> None:
    held = {"weights": GIB, "gradients": GIB}
    ahead = look_ahead(ran_out(FULL.with_(optim="adamw_8bit"), "optimizer_step", held))
    assert ahead is not None
    n = GIB // 2
    assert ahead["still"] == {"optimizer_state": 2 * (n + 4 * (n // 256))}
    assert look_ahead(ran_out(FULL.with_(optim="paged_adamw_8bit"), "optimizer_step", held)) is None


def test_a_foreign_adam_is_known_by_its_frames_and_others_are_not() -> None:
    held = {"weights": GIB, "gradients": GIB, "optimizer_state": GIB}
    stack = ["/x/site-packages/torch/optim/adamw.py:143 _init_group"]
    ahead = look_ahead(ran_out(None, "optimizer_step", held, stack=stack))
    assert ahead is not None
    assert ahead["still"] == {"optimizer_state": GIB}
    other = ["/home/me/muon.py:3 step"]
    assert look_ahead(ran_out(None, "optimizer_step", held, stack=other)) is None


def test_a_first_backward_has_gradients_and_state_to_make() -> None:
    held = {"weights": 3 * GIB, "gradients": GIB, "activations": 4 * GIB}
    ahead = look_ahead(ran_out(FULL, "backward", held))
    assert ahead is not None
    assert ahead["still"] == {"gradients": 2 * GIB, "optimizer_state": 6 * GIB}
    # The activations are gone when the optimizer steps: weights, gradients and two moments are left.
    assert (ahead["moment"], ahead["needed_bytes"]) == ("optimizer_step", 12 * GIB)


def test_a_backward_that_needs_more_now_than_its_step_says_so() -> None:
    held = {"weights": GIB, "optimizer_state": 2 * GIB, "activations": 30 * GIB}
    ahead = look_ahead(ran_out(FULL, "backward", held))
    assert ahead is not None
    assert ahead["still"] == {"gradients": GIB}
    assert (ahead["moment"], ahead["needed_bytes"]) == ("backward", 33 * GIB + 47 * MIB)


def test_an_adapter_has_its_own_gradients_and_state_only() -> None:
    held = {"weights": 3 * GIB, "adapters": 40 * MIB, "activations": GIB}
    ahead = look_ahead(ran_out(FULL.with_(lora_r=16), "forward", held))
    assert ahead is not None
    assert ahead["still"] == {"gradients": 40 * MIB, "optimizer_state": 80 * MIB}


def test_generation_has_the_rest_of_its_cache_to_make() -> None:
    """Keys and values of 4 heads of 128, 20 layers, 1024 tokens of 8 sequences for each of the steps."""
    settings = FULL.with_(per_device_train_batch_size=8, num_generations=8)
    held = {"weights": GIB, "kv_cache": 100 * MIB}
    ahead = look_ahead(ran_out(settings, "generate", held))
    assert ahead is not None
    whole = 8 * settings.generation_steps * 20 * 2 * 4 * 128 * 1024 * 2
    assert ahead["still"] == {"kv_cache": whole - 100 * MIB}
    assert ahead["needed_bytes"] == GIB + whole


def test_nothing_is_said_where_nothing_is_known() -> None:
    held = {"weights": GIB, "activations": GIB}
    assert look_ahead(ran_out(None, "forward", held)) is None
    assert look_ahead(ran_out(FULL, "reward", held)) is None
    assert look_ahead(ran_out(FULL, "backward", held, categories=None)) is None


def test_a_smaller_state_saves_of_what_was_still_to_be_made_too() -> None:
    held = {"weights": 4 * GIB, "gradients": 4 * GIB, "optimizer_state": 4 * GIB}
    failed = report({"optimizer_step": held}, Settings(model="m", dtype="bfloat16"), "cuda")
    oom = {"phase": "optimizer_step", "requested_bytes": GIB, "device_free_bytes": 0}
    failed["oom"] = whole_oom(oom)
    now = {e["id"]: e["saves_bytes"] for e in estimated_advice(failed)}
    ahead = {"still": {"optimizer_state": 4 * GIB}, "short_bytes": 3 * GIB}
    failed["oom"] = whole_oom(oom | {"ahead": ahead})
    whole = {e["id"]: e["saves_bytes"] for e in estimated_advice(failed)}
    assert whole["paged_adamw_8bit"] == now["paged_adamw_8bit"] + 4 * GIB
    assert whole["adamw_8bit"] == pytest.approx(2 * now["adamw_8bit"], rel=1e-6)
