"""Estimates, held to arithmetic on phases' peaks that were made up."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from memprof.advice.candidates import candidates_for
from memprof.advice.estimate import entry, estimate
from memprof.advice.evaluate import _ranked_so_far
from memprof.advice.training_moments import held as kept_for_backward
from memprof.advice.training_moments import kept_by_a_layer, moments
from memprof.config.catalogue import find_config
from memprof.config.model_shape import ModelShape
from memprof.config.settings import Settings
from memprof.report.codec import plain_entries
from tests.advice.reports import GIB, MODEL, report
from tests.report.plain import as_report, estimated_advice, run_of

FULL = Settings(model="m", gradient_checkpointing=False, prompt_length=256, completion_length=768)
# At the peak of its simulation (benchmarks/advice/simulated.py: the first run), 8 x 1024 tokens.
QWEN_ACTIVATIONS = 27_408_584_704
HELD = {"weights": 6 * GIB, "optimizer_state": 12 * GIB}


def _advice(phases: dict[str, dict[str, int]], settings: Settings | None = FULL, **more: Any) -> dict[str, Any]:
    return {entry["id"]: entry for entry in estimated_advice(report(phases, settings, **more))}


def test_half_the_micro_batch_is_half_the_activations_and_gradients_stay() -> None:
    held = {"forward": {**HELD, "activations": 40 * GIB}, "optimizer_step": {**HELD, "gradients": 6 * GIB}}
    run = run_of(report(held, FULL))
    found = next(e for e in estimate(run) if e.candidate.id == "micro_batch_4")
    # From the second pass on, the first one's gradients are alive in forward: four bytes a parameter.
    gradients = 4 * ModelShape.of(MODEL).parameters
    assert found.saves == 20 * GIB - gradients
    written = entry(found, run)
    assert written.peak_after_bytes == 38 * GIB + gradients
    assert written.exact
    assert written.basis == "estimated"
    assert "gradient_accumulation_steps=2" in (written.setting or "")
    assert written.moves_to is None


def test_a_change_saves_no_more_than_the_next_peak_allows() -> None:
    """Activations give back nearly 36 GiB; the optimizer's step is then the peak."""
    phases = {
        "backward": {**HELD, "activations": 40 * GIB},
        "optimizer_step": {**HELD, "gradients": 6 * GIB, "temporaries": 6 * GIB},
    }
    entry = _advice(phases)["checkpointing"]
    assert entry["saves_bytes"] == (58 - 30) * GIB
    assert entry["moves_to"] == "optimizer_step"


# A decoder layer of MODEL under bfloat16 autocast, bytes a token, one tensor after the other.
_H, _I, _Q, _KV = 2048, 8192, 2048, 512
_ATTENTION = 2 * _Q + 2 * _KV + 2 * _KV + 2 * _Q + 4 * 16  # q, k, v, output, a float32 for each head
_MLP = 3 * 2 * _I  # gate, its activation, up
_FULL_LAYER = 2 * (4 * _H + 4 * _H) + 5 * 2 * _H + 2 * _I + _ATTENTION + _MLP  # norms; casts for q, k, v, gate, up


def test_a_layer_keeps_these_tensors() -> None:
    """And without checkpointing a simulated Qwen2.5-1.5B keeps what they add up to, within 1%."""
    shape = ModelShape.of(MODEL)
    assert kept_by_a_layer(FULL, shape) == _FULL_LAYER
    bf16 = 2 * (4 * _H + 2 * _H) + 2 * 2 * _H + 2 * _I + _ATTENTION + _MLP
    assert kept_by_a_layer(FULL.with_(dtype="bfloat16"), shape) == bf16
    lora = 2 * 4 * _H + 5 * 2 * _H + 2 * _Q + 2 * _I + _ATTENTION + _MLP  # norms are frozen; the adapters cast
    assert kept_by_a_layer(FULL.with_(lora_r=16), shape) == lora
    assert kept_by_a_layer(FULL.with_(lora_r=16, dtype="bfloat16"), shape) == lora
    four_bits = 2 * 4 * _H + 2 * 2 * _H + 2 * _I + _ATTENTION + _MLP  # adapters are bfloat16: nothing is cast
    assert kept_by_a_layer(FULL.with_(lora_r=16, dtype="bfloat16", load_in_4bit=True), shape) == four_bits

    qwen = FULL.with_(model="Qwen/Qwen2.5-1.5B-Instruct")
    assert kept_for_backward(qwen, ModelShape.of(find_config(qwen.model))) == pytest.approx(QWEN_ACTIVATIONS, rel=0.01)


def test_checkpoints_are_layers_times_tokens_times_width() -> None:
    entry = _advice({"forward": {**HELD, "activations": 40 * GIB}})["checkpointing"]
    boundaries = 20 * (8 * 1024) * 2048 * 4
    all_kept = (8 * 1024) * (20 * _FULL_LAYER + 2 * _H)  # and the last layer's output
    assert entry["saves_bytes"] == pytest.approx(40 * GIB * (1 - boundaries / all_kept), abs=1)


def test_an_adapters_copies_are_highest_while_a_layer_is_computed_again() -> None:
    """PEFT's float32 copy of the MLP's product, beside everything that a layer keeps and all layers' inputs."""
    tokens, settings = 8 * 1024, FULL.with_(gradient_checkpointing=True, lora_r=16, dtype="bfloat16")
    shape = ModelShape.of(MODEL)
    found = moments(settings, shape, 0)["backward"]
    highest = max(found, key=lambda name: sum(found[name].values()))
    assert highest == "last layer, computed again"
    boundaries = 20 * tokens * _H * 2
    working = 2 * _I + 4 * _I + 2 * 2 * _H  # the product, its copy; the layer's output, and the adapter's
    assert found[highest]["activations"] == boundaries + tokens * (kept_by_a_layer(settings, shape) + working)


def test_with_checkpoints_the_end_of_backward_can_be_highest() -> None:
    """There all gradients are alive, and one layer's activations with the gradients of its MLP."""
    tokens, parameters = 8 * 1024, ModelShape.of(MODEL).parameters
    recorded = {
        "activations": 20 * tokens * _FULL_LAYER, "gradients": 4 * 64000 * _H,
        "weight_casts": 2 * (parameters - 64000 * _H),
    }  # fmt: skip
    found = _advice({"backward": {**HELD, **recorded}})["checkpointing"]
    layer = (parameters - 64000 * _H) // 20
    left = {
        "activations": tokens * (_FULL_LAYER - 2 * _I),  # without the MLP's product
        "activation_gradients": tokens * (3 * 2 * _I + 4 * _H + 2 * _H),
        "gradients": 4 * (parameters - (layer - _H * _I)),  # all, but the first layer's: its last product's only
        "weight_casts": 2 * layer,
    }
    assert found["saves_bytes"] == pytest.approx(sum(recorded.values()) - sum(left.values()), rel=1e-6)


def test_8_bit_moments_keep_embeddings_as_they_are() -> None:
    entry = _advice({"optimizer_step": {**HELD, "gradients": 6 * GIB}})["adamw_8bit"]
    share = 64000 * 2048 / ModelShape.of(MODEL).parameters
    left = (1 - share) * 12 * GIB * 2.03 / 8 + share * 12 * GIB
    assert entry["saves_bytes"] == pytest.approx(12 * GIB - left, rel=1e-6)
    assert not entry["exact"]


def test_an_adapter_takes_gradients_state_and_reference_away() -> None:
    settings = FULL.with_(beta=0.04)
    held = {**HELD, "gradients": 6 * GIB, "reference_model": 6 * GIB}
    entry = _advice({"optimizer_step": held}, settings)["lora"]
    adapters = 4 * ModelShape.of(MODEL).adapter_parameters(16)  # float32: once for itself, its gradients, each moment
    assert entry["saves_bytes"] == 18 * GIB + 6 * GIB - 4 * adapters
    assert "reference" in entry["action"]


def test_bfloat16_halves_the_residual_stream_too() -> None:
    settings = FULL.with_(gradient_checkpointing=True)
    found = _advice({"forward": {"weights": 6 * GIB, "weight_casts": 3 * GIB, "activations": 8 * GIB}}, settings)
    assert found["bf16_weights"]["saves_bytes"] == 3 * GIB + 3 * GIB + 4 * GIB


def test_a_change_that_touches_no_pass_saves_nothing_of_it() -> None:
    """Whatever the formulas make of the recorded bytes: an optimizer's state is all that it changes."""
    held = {**HELD, "activations": 7 * GIB, "activation_gradients": 3 * GIB, "gradients": GIB, "weight_casts": GIB}
    for settings in (FULL, FULL.with_(gradient_checkpointing=True)):
        found = _advice({"backward": held}, settings)
        assert found["paged_adamw_8bit"]["saves_bytes"] == HELD["optimizer_state"]


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
    assert "smaller_pieces" not in _advice({"backward": phases["backward"]}, lean)  # by bytes, they are small
    trained = _advice({"backward": phases["backward"]}, lean.with_(max_tokens_per_piece=2048))
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


def test_logits_follow_the_completions_alone() -> None:
    settings = FULL.with_(recipe="trl-full-logits", gradient_checkpointing=True)
    held = {"reference_logprobs": {**HELD, "loss_logits": 20 * GIB}}
    assert _advice(held, settings)["shorter_completions"]["saves_bytes"] == 10 * GIB
    prompts = FULL.with_(recipe="trl-full-logits", prompt_length=2048, completion_length=512)
    assert "shorter_prompts" not in _advice(held, prompts)


def test_an_adapter_over_four_bits_is_half_as_wide() -> None:
    settings = FULL.with_(lora_r=16, dtype="bfloat16")
    held = {"weights": 3 * GIB, "adapters": GIB, "gradients": GIB, "optimizer_state": 2 * GIB}
    found = _advice({"optimizer_step": held}, settings)["qlora"]
    shape = ModelShape.of(MODEL)
    linear = shape.parameters - shape.embeddings
    assert found["saves_bytes"] == pytest.approx(2 * GIB + linear * (2 - 0.5 - 4 / 64), abs=2)


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


def test_a_strangers_pickle_is_advised_by_its_categories() -> None:
    held = {**HELD, "gradients": 6 * GIB, "activations": 20 * GIB}
    found = _advice({"backward": held}, None, kind="cuda")
    assert found["adamw_8bit"]["saves_bytes"] == pytest.approx(12 * GIB * (1 - 2.03 / 8), rel=1e-6)
    assert found["checkpointing"]["saves_bytes"] == pytest.approx(18 * GIB, rel=1e-6)
    assert found["micro_batch_half"]["saves_bytes"] == 10 * GIB
    assert set(_advice({"forward": {"weights": GIB}}, None, kind="cuda")) == {"smaller_weights"}
    # No gradient was ever seen, and nothing says that activations were kept: this is no training.
    passing = {"weights": GIB, "activations": GIB}
    assert set(_advice({"forward": passing}, None, kind="cuda")) == {"smaller_weights", "made_here"}
    kept = _advice({"forward": {"activations": GIB}}, None, kind="cuda", details={"activations": {"saved": GIB}})
    assert set(kept) == {"micro_batch_half", "checkpointing", "made_here"}


def test_the_first_thing_to_change_comes_first_and_then_what_saves_most() -> None:
    found = estimated_advice(report({"forward": {**HELD, "activations": 40 * GIB}}, FULL))
    saved = [e["saves_bytes"] for e in found]
    assert found[0]["exact"]
    assert saved[0] >= 0.4 * max(saved)
    assert saved[1:] == sorted(saved[1:], reverse=True)
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


def test_settings_that_cannot_be_read_are_said_to_be() -> None:
    odd = report({"forward": {**HELD, "activations": 40 * GIB}}, None, kind="cuda")
    odd["source"] |= {
        "config": {"num_generations": 4, "model_name": "m", "lora_r": "many"},
        "setup": {"model_config": MODEL},
    }
    with pytest.warns(UserWarning, match="memprof advises without the run's settings, which it could not read"):
        assert run_of(odd).settings is None
    odd["source"]["config"] = {"trainer": "a loop of its own"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a run that is none of those simulated was read well
        assert run_of(odd).settings is None


SUPERVISED = {"prompt_length": 256, "completion_length": 768, "gradient_checkpointing": False}
PASSES = {
    "forward": {**HELD, "activations": 40 * GIB, "reference_model": 6 * GIB},
    "optimizer_step": {**HELD, "gradients": 6 * GIB},
}
OF_GRPO = ("generat", "completion", "vllm", "beta", "lean", "Lean", "KL term")


@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_trainers_whose_rows_are_given_get_no_advice_about_generation(trainer: str) -> None:
    found = _advice(PASSES, Settings(model="m", trainer=trainer, dtype="float32", **SUPERVISED))
    assert {"checkpointing", "offloaded_checkpoints", "lora", "qlora", "bf16_weights", "micro_batch_1"} <= found.keys()
    for row in found.values():
        assert not [w for w in OF_GRPO if w in f"{row['action']} {row['setting']} {row['costs'].split('.')[0]}"]
    assert found["offloaded_checkpoints"]["setting"].endswith("activation_offloading=True")
    assert "steps_per_generation" not in found["micro_batch_1"]["setting"]
    every = {c.id for c in candidates_for(run_of(report(PASSES, Settings(model="m", trainer=trainer, **SUPERVISED))))}
    assert ("precomputed_reference" in every) is (trainer == "dpo")
    assert ("row" if trainer == "sft" else "pair") in found["micro_batch_1"]["action"]


@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_their_candidates_make_settings_that_can_be_simulated(trainer: str) -> None:
    settings = Settings(model="m", trainer=trainer, attn="math", **SUPERVISED)
    for candidate in candidates_for(run_of(report(PASSES, settings))):
        changed = settings.with_(**candidate.changes)
        assert changed.trainer == trainer
        assert candidate.id != "shorter_rows" or changed.sequence_length == settings.sequence_length // 2


def test_a_reports_own_estimate_of_time_prices_what_it_can() -> None:
    time = {"step_s": 10.0, "phases": {"forward": 2.0, "backward": 4.0, "generate": 4.0}, "basis": "roofline",
            "assumptions": []}  # fmt: skip
    made = {**report(PASSES, FULL), "estimated_time": time}
    found = {entry["id"]: entry for entry in estimated_advice(made)}
    assert found["checkpointing"]["time_ratio"] == 1.2
    assert "time_ratio" not in found["lora"]
    assert "time_ratio" not in _advice(PASSES)["checkpointing"]


def test_what_the_loop_left_is_advised_beside_simulations_too() -> None:
    held = {"forward": {**HELD, "activations": 20 * GIB}, "optimizer_step": {**HELD, "gradients": 18 * GIB}}
    left = {"kind": "left_over", "category": "activations", "bytes": 4 * GIB, "count": 1, "saves_bytes": 3 * GIB,
            "frame": "/me/train.py:9 main", "passes": 1}  # fmt: skip
    seen = report(held, FULL, findings=[left])
    run = run_of(seen)
    known = estimate(run)
    for rows in (plain_entries(_ranked_so_far(known, known, {}, run, as_report(seen))), estimated_advice(seen)):
        found = next(row for row in rows if row["id"] == "left_over")
        # The optimizer's step, 2 GiB lower than forward, is no higher than what is left.
        assert (found["saves_bytes"], found["takes"]) == (2 * GIB, {"activations": 3 * GIB})
        assert found["exact"]
        assert "train.py:9 main" in found["action"]


@pytest.mark.parametrize("kind", [{"peft_type": "IA3"}, {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 20}])
def test_an_adapter_other_than_lora_is_not_full_fine_tuning(kind: dict[str, Any]) -> None:
    """Its base is frozen: no LoRA, sharding or reference model is advised, and bfloat16 keeps its gradients."""
    settings = Settings(model="m", dtype="float32", gpus=2, beta=0.04, gradient_checkpointing=False, **kind)
    held = {"weights": 6 * GIB, "adapters": GIB // 64, "optimizer_state": GIB // 32}
    phases = {"backward": {**held, "gradients": GIB // 64, "activations": 40 * GIB}}
    found = _advice(phases, settings)
    assert found.keys().isdisjoint({"lora", "qlora", "fsdp2", "no_reference"})
    assert "bf16_weights" in found
    frozen = {c.id: c for c in candidates_for(run_of(report(phases, settings)))}["bf16_weights"]
    assert "frozen" in frozen.action.lower()
    without = settings.with_(peft_type="LORA", num_virtual_tokens=None)
    offered = {c.id for c in candidates_for(run_of(report(phases, without)))}
    assert {"lora", "qlora", "fsdp2", "no_reference"} <= offered
