"""Estimates, held to arithmetic on phases' peaks that were made up."""

from __future__ import annotations

from typing import Any

import pytest

from memprof.advice import estimated_advice
from memprof.advice.candidates import candidates_for
from memprof.advice.estimate import run_of
from memprof.advice.model import Sizes
from memprof.simulate.settings import Settings
from tests.advice.reports import GIB, MODEL, report

FULL = Settings(model="m", gradient_checkpointing=False, prompt_length=256, completion_length=768)
HELD = {"weights": 6 * GIB, "optimizer_state": 12 * GIB}


def _advice(phases: dict[str, dict[str, int]], settings: Settings | None = FULL, **more: Any) -> dict[str, Any]:
    return {entry["id"]: entry for entry in estimated_advice(report(phases, settings, **more))}


def test_half_the_micro_batch_is_half_the_activations_and_gradients_stay() -> None:
    phases = {
        "forward": {**HELD, "activations": 40 * GIB},
        "backward": {**HELD, "activations": 30 * GIB, "gradients": 2 * GIB},
        "optimizer_step": {**HELD, "gradients": 6 * GIB},
    }
    entry = _advice(phases)["micro_batch_4"]
    # From the second pass on, the first one's gradients (6 GiB) are alive in forward and backward.
    assert entry["saves_bytes"] == 20 * GIB - 6 * GIB
    assert entry["peak_after_bytes"] == (58 - 14) * GIB
    assert entry["exact"]
    assert entry["basis"] == "estimated"
    assert "gradient_accumulation_steps=2" in entry["setting"]
    assert "moves_to" not in entry


def test_a_change_saves_no_more_than_the_next_peak_allows() -> None:
    """Activations give back nearly 36 GiB; the optimizer's step is then the peak."""
    phases = {
        "backward": {**HELD, "activations": 40 * GIB},
        "optimizer_step": {**HELD, "gradients": 6 * GIB, "temporaries": 6 * GIB},
    }
    entry = _advice(phases)["checkpointing"]
    assert entry["saves_bytes"] == (58 - 30) * GIB
    assert entry["moves_to"] == "optimizer_step"


def test_checkpoints_are_layers_times_tokens_times_width() -> None:
    entry = _advice({"forward": {**HELD, "activations": 40 * GIB}})["checkpointing"]
    boundaries = 20 * (8 * 1024) * 2048 * 4
    assert entry["saves_bytes"] == 40 * GIB - boundaries - 40 * GIB // 20


def test_8_bit_moments_keep_embeddings_as_they_are() -> None:
    entry = _advice({"optimizer_step": {**HELD, "gradients": 6 * GIB}})["adamw_8bit"]
    share = 64000 * 2048 / Sizes.of(MODEL).parameters
    left = (1 - share) * 12 * GIB * 2.03 / 8 + share * 12 * GIB
    assert entry["saves_bytes"] == pytest.approx(12 * GIB - left, rel=1e-6)
    assert not entry["exact"]


def test_an_adapter_takes_gradients_state_and_reference_away() -> None:
    settings = FULL.with_(beta=0.04)
    held = {**HELD, "gradients": 6 * GIB, "reference_model": 6 * GIB}
    entry = _advice({"optimizer_step": held}, settings)["lora"]
    sizes = Sizes.of(MODEL)
    share = sizes.adapter_parameters(16) / sizes.parameters
    assert entry["saves_bytes"] == pytest.approx(18 * GIB * (1 - share) + 6 * GIB - 6 * GIB * share, rel=1e-6)
    assert "reference" in entry["action"]


def test_bfloat16_halves_the_residual_stream_too() -> None:
    settings = FULL.with_(gradient_checkpointing=True)
    entry = _advice({"forward": {"weights": 6 * GIB, "weight_casts": 3 * GIB, "activations": 8 * GIB}}, settings)
    boundaries = 20 * (8 * 1024) * 2048 * 4
    assert entry["bf16_weights"]["saves_bytes"] == 3 * GIB + 3 * GIB + boundaries // 2


def test_only_what_applies_is_offered() -> None:
    held = {"forward": {**HELD, "activations": 40 * GIB}}
    checkpointed = _advice(held, FULL.with_(gradient_checkpointing=True, lora_r=8, dtype="bfloat16"))
    assert not {"checkpointing", "lora", "bf16_weights", "no_reference"} & checkpointed.keys()
    single = _advice(held, FULL.with_(per_device_train_batch_size=1, gradient_accumulation_steps=8))
    assert not any(name.startswith("micro_batch") for name in single)


def test_the_lean_trainer_is_advised_in_its_own_settings() -> None:
    lean = FULL.with_(recipe="lean", prompt_length=128, completion_length=384)
    phases = {
        "generate": {**HELD, "kv_cache": 30 * GIB},
        "backward": {**HELD, "activations": 20 * GIB, "gradients": 4 * GIB},
    }
    found = _advice(phases, lean)
    assert not {"lean", "micro_batch_4", "micro_batch_1"} & found.keys()
    assert found["generated_together"]["setting"] == "generation_batch=4"
    assert found["generated_together"]["saves_bytes"] == (48 - 42) * GIB  # backward is then the peak
    trained = _advice({"backward": phases["backward"]}, lean)
    assert trained["smaller_pieces"]["setting"] == "max_tokens_per_piece=512"
    assert trained["smaller_pieces"]["saves_bytes"] == 15 * GIB  # one of the four that 2048 tokens hold
    assert trained["checkpointing"]["setting"] == 'gradient_checkpointing=True, checkpointing="auto"'
    kept = {c.id: c for c in candidates_for(run_of(report(phases, lean.with_(gradient_checkpointing="full"))))}
    assert kept["offloaded_checkpoints"].setting == 'checkpointing="offloaded"'
    assert "checkpointing" not in kept


def test_every_candidate_makes_settings_that_can_be_simulated() -> None:
    for settings in (
        FULL,
        FULL.with_(beta=0.1, optim="adamw_torch", padding="worst"),
        FULL.with_(per_device_train_batch_size=6, num_generations=6, steps_per_generation=4),
        FULL.with_(generation="vllm", prompt_length=4096),
        FULL.with_(gpus=4, attn="math", recipe="trl-full-logits"),
        FULL.with_(lora_r=8, load_in_4bit=True),
        FULL.with_(recipe="lean", completion_length=64),
        FULL.with_(recipe="lean", gradient_checkpointing="full", max_tokens_per_piece=4096, generation_batch=3),
    ):
        run = run_of(report({"forward": {**HELD, "activations": GIB}}, settings))
        found = candidates_for(run)
        assert len({c.id for c in found}) == len(found)
        for candidate in found:
            changed = settings.with_(**candidate.changes)
            assert changed != settings, candidate.id
            batch = changed.per_device_train_batch_size * changed.generation_steps
            if candidate.exact:  # the same completions are trained on
                assert batch == settings.per_device_train_batch_size * settings.generation_steps, candidate.id


def test_what_does_not_go_together_is_not_offered() -> None:
    sharded = FULL.with_(gpus=8, sharding="zero2", dtype="bfloat16", mixed_precision="bf16")
    found = _advice({"forward": {**HELD, "activations": 40 * GIB}}, sharded)
    assert "checkpointing" in found
    assert not {"adamw_8bit", "qlora"} & found.keys()


def test_a_cache_in_4_bits_counts_where_generation_is_the_peak() -> None:
    held = {"weights": 6 * GIB, "kv_cache": 20 * GIB}
    entry = _advice({"generate": held, "forward": HELD}, FULL.with_(dtype="bfloat16"))["quantized_cache"]
    assert entry["saves_bytes"] == (26 - 18) * GIB
    assert entry["moves_to"] == "forward"


def test_fragmentation_is_about_the_device() -> None:
    held = {"backward": {**HELD, "activations": 4 * GIB}}
    entry = _advice(held, reserved_bytes=30 * GIB, inactive_split_bytes=5 * GIB)["expandable_segments"]
    assert (entry["peak"], entry["saves_bytes"]) == ("device", 5 * GIB)
    assert "peak_after_bytes" not in entry
    already = FULL.with_(alloc_conf="expandable_segments:True")
    assert "expandable_segments" not in _advice(held, already, reserved_bytes=30 * GIB, inactive_split_bytes=5 * GIB)
    assert "expandable_segments" not in _advice(held, reserved_bytes=30 * GIB, inactive_split_bytes=GIB)


def test_a_strangers_pickle_is_advised_by_its_categories() -> None:
    held = {**HELD, "gradients": 6 * GIB, "activations": 20 * GIB}
    found = _advice({"backward": held}, None, kind="cuda")
    assert found["adamw_8bit"]["saves_bytes"] == pytest.approx(12 * GIB * (1 - 2.03 / 8), rel=1e-6)
    assert found["checkpointing"]["saves_bytes"] == pytest.approx(18 * GIB, rel=1e-6)
    assert found["micro_batch_half"]["saves_bytes"] == 10 * GIB
    assert _advice({"forward": {"weights": GIB}}, None, kind="cuda") == {}
    # No gradient was ever seen, and nothing says that activations were kept: this is no training.
    assert _advice({"forward": {"weights": GIB, "activations": GIB}}, None, kind="cuda") == {}
    kept = _advice({"forward": {"activations": GIB}}, None, kind="cuda", details={"activations": {"saved": GIB}})
    assert set(kept) == {"micro_batch_half", "checkpointing"}


def test_what_saves_most_comes_first() -> None:
    saved = [e["saves_bytes"] for e in estimated_advice(report({"forward": {**HELD, "activations": 40 * GIB}}, FULL))]
    assert saved == sorted(saved, reverse=True)
    assert len(saved) >= 4


def test_odd_configurations_cost_nothing_but_the_advice() -> None:
    for config in (
        {"model": "x" * 5000},
        {"model_name": "a\0b"},
        {"model": 3},
        {"num_generations": "x"},
        {"model_name": "m", "per_device_train_batch_size": None},
    ):
        odd = report({"forward": {**HELD, "activations": 40 * GIB}}, None, kind="cuda")
        odd["source"] |= {"config": config, "setup": {"batches": [1, [2], ["a"] * 4], "dtypes": {"float32": "x"}}}
        odd["peak"]["details"] = {"activations": {"saved": 40 * GIB}}
        assert run_of(odd).settings is None
        assert estimated_advice(odd)
