"""Advice for runs that do not say how they were configured, and which change is named first."""

from __future__ import annotations

from typing import Any

import pytest

from memprof.advice.candidates import candidates_for
from memprof.config.settings import Settings
from memprof.oom.framework_settings import PLAIN, frameworks
from tests.advice.reports import GIB, report
from tests.report.plain import estimated_advice, headline_of, ranked, run_of, whole_oom

VLLM = "/x/site-packages/vllm/v1/worker/gpu_model_runner.py:4000 _allocate_kv_cache_tensors"
VERL = "/x/site-packages/verl/workers/fsdp_workers.py:700 generate_sequences"


def made(category: str, n_bytes: int, *stack: str) -> dict[str, Any]:
    return {
        "address": 1, "bytes": n_bytes, "each_bytes": n_bytes, "count": 1, "category": category, "detail": None,
        "evidence": "stack", "rule": None, "alternatives": [], "phase": "forward", "born_us": None, "died_us": None,
        "retained": False, "stack": list(stack),
    }  # fmt: skip


def foreign(phases: dict[str, dict[str, int]], *largest: dict[str, Any], **peak: Any) -> dict[str, Any]:
    found = report(phases, None, "cuda", **peak)
    found["peak"]["largest"] = list(largest)
    return found


def test_an_engines_pool_that_is_most_of_the_peak_is_addressed_first() -> None:
    held = {"kv_cache": 17 * GIB, "weights": 2 * GIB, "gradients": GIB}
    first = estimated_advice(foreign({"forward": held}, made("kv_cache", 17 * GIB, VLLM)))[0]
    assert first["id"] in ("engine_share", "engine_sleep")
    ids = {e["id"]: e for e in estimated_advice(foreign({"generate": held}, made("kv_cache", 17 * GIB, VLLM)))}
    assert ids["engine_share"]["saves_bytes"] == round(17 * GIB / 3)
    assert ids["engine_share"]["setting"] == (
        "lower gpu_memory_utilization; or lower max_model_len, so that a smaller KV cache is enough"
    )
    assert "engine_sleep" not in ids


def test_settings_are_in_the_words_of_the_framework_that_ran() -> None:
    held = {"kv_cache": 9 * GIB, "weights": GIB}
    found = estimated_advice(foreign({"generate": held}, made("kv_cache", 9 * GIB, VLLM, VERL)))[0]
    assert found["setting"].startswith("lower actor_rollout_ref.rollout.gpu_memory_utilization")


FRAMES = {
    "verl": "/x/site-packages/verl/workers/actor/dp_actor.py:9 update_policy",
    "slime": "/root/slime/slime/backends/megatron_utils/model.py:9 train",
    "NeMo-RL": "/opt/nemo-rl/nemo_rl/models/policy/workers/dtensor_policy_worker.py:9 train",
    "OpenRLHF": "/x/site-packages/openrlhf/trainer/ray/ppo_actor.py:9 training_step",
    "torchtitan": "/root/torchtitan/torchtitan/train.py:9 train_step",
    "Megatron": "/opt/megatron/core/transformer/mlp.py:9 forward",
    "TRL": "/x/site-packages/trl/trainer/grpo_trainer.py:9 training_step",
}
# What of TRL's and transformers' is no setting anywhere else.
TRLS = ("peft_config=", "per_device_train_batch_size", "vllm_enable_sleep_mode", "optim=")


@pytest.mark.parametrize("framework", FRAMES)
def test_a_full_training_is_advised_in_its_own_frameworks_words_only(framework: str) -> None:
    held = {
        "weights": 8 * GIB, "gradients": 8 * GIB, "optimizer_state": 32 * GIB, "activations": 20 * GIB,
        "loss_logits": 12 * GIB,
    }  # fmt: skip
    seen = foreign({"backward": held}, made("weights", 8 * GIB, FRAMES[framework]))
    found = {e["id"]: e["setting"] for e in estimated_advice(seen)}
    assert {"micro_batch_half", "checkpointing"} <= set(found)
    own = next(names for names in frameworks() if names.framework == framework).words
    for name, word in (("lora", "adapter"), ("adamw_8bit", "optimizer"), ("chunked_logits", "logits")):
        assert found.get(name) == own.get(word), name
    if framework != "TRL":
        assert not [word for word in TRLS for setting in found.values() if word in setting]


def test_a_training_beside_an_engine_of_no_known_framework_is_not_told_the_engines_settings() -> None:
    held = {"kv_cache": 9 * GIB, "activations": 9 * GIB, "gradients": GIB}
    found = {e["id"]: e["setting"] for e in estimated_advice(foreign({"backward": held}, made("kv_cache", GIB, VLLM)))}
    assert found["engine_share"].startswith("lower gpu_memory_utilization")
    assert found["checkpointing"] == PLAIN.words["checkpointing"]
    assert found["micro_batch_half"] == PLAIN.words["micro_batch"]


def test_a_method_of_transformers_models_is_named_where_these_are_seen_alone() -> None:
    def said(frame: str) -> str:
        kept = {"weights": GIB, "activations": 9 * GIB, "gradients": GIB}
        seen = estimated_advice(foreign({"backward": kept}, made("activations", 9 * GIB, frame)))
        return next(e["setting"] for e in seen if e["id"] == "checkpointing")

    assert "gradient_checkpointing_enable" in said("/x/transformers/models/llama/modeling_llama.py:9 forward")
    assert "gradient_checkpointing_enable" not in said("/x/site-packages/torchvision/models/resnet.py:9 forward")


@pytest.mark.parametrize(
    ("frame", "bits", "narrow", "saved"),
    [("/root/flexgen/pytorch_backend.py:9 init", 16, "4 bits instead of 16", 11.5 / 16),
     ("/root/flexgen/pytorch_backend.py:9 init", None, "4 bits", 11.5 / 16),
     ("/x/vllm/worker.py:9 load", 16, "8 bits instead of 16", 1 / 2),
     ("/home/me/load.py:9 load", 16, "8 bits instead of 16", 1 / 2),
     ("/home/me/load.py:9 load", 32, "bfloat16 instead of float32", 1 / 2)],
)  # fmt: skip
def test_weights_take_the_bits_of_the_flag_that_is_named(
    frame: str, bits: int | None, narrow: str, saved: float
) -> None:
    seen = foreign({"forward": {"weights": 16 * GIB}}, made("weights", 16 * GIB, frame), weights_bits=bits)
    found = next(e for e in estimated_advice(seen) if e["id"] == "smaller_weights")
    assert (found["action"], found["saves_bytes"]) == (f"Store the weights in {narrow}", 16 * saved * GIB)


@pytest.mark.parametrize(
    ("frame", "stack", "action", "setting"),
    [("/home/me/load.py:9 build", "/home/me/load.py:9 build", "Create the weights once: load.py:9", "share one copy"),
     ("", "/home/me/load.py:9 build", "Find a second copy", "del the variable"),
     ("", "/usr/lib/python3.11/copy.py:9 deepcopy", "Find a second copy", "no deepcopy on the device")],
)  # fmt: skip
def test_two_copies_are_advised_by_how_they_were_made(frame: str, stack: str, action: str, setting: str) -> None:
    found = {"kind": "two_copies", "category": "weights", "bytes": 4 * GIB, "count": 9, "saves_bytes": 4 * GIB,
             "frame": frame}  # fmt: skip
    seen = foreign({"other": {"weights": 8 * GIB}}, made("weights", 8 * GIB, stack), findings=[found])
    first = estimated_advice(seen)[0]
    assert first["id"] == "two_copies"
    assert first["action"].startswith(action)
    assert setting in first["setting"]
    cause = headline_of({**seen, "advice": [first]})["cause"]
    assert ("or one and its gradients" in cause) is not bool(frame)


@pytest.mark.parametrize(
    ("passes", "said"), [(1, "the one that validate.py:63 validate sets"), (25, "called from validate.py:63 validate")]
)
def test_the_users_line_is_named_where_a_library_made_what_is_left(passes: int, said: str) -> None:
    found = {"kind": "left_over", "category": "activations", "bytes": 4 * GIB, "count": 1, "saves_bytes": 4 * GIB,
             "frame": "/x/site-packages/diffusers/models/attention_processor.py:1262 __call__", "passes": passes,
             "held_at": "/home/me/validate.py:63 validate"}  # fmt: skip
    first = estimated_advice(foreign({"forward": {"activations": 8 * GIB}}, findings=[found]))[0]
    assert said in f"{first['action']} {first['setting']}"


def test_growing_segments_are_no_advice_where_the_engine_maps_its_memory_itself() -> None:
    held = {"weights": 8 * GIB}
    seen = foreign({"generate": held}, made("weights", 8 * GIB, VERL), reserved_bytes=12 * GIB)
    assert "expandable_segments" not in {c.id for c in candidates_for(run_of(seen))}


def test_what_a_change_leaves_counts_from_the_peak_that_is_shown() -> None:
    held = {"kv_cache": 20 * GIB, "activations": 3 * GIB, "gradients": GIB // 4}
    peak = 23 * GIB + GIB // 4 - 100 * 2**20  # 100 MiB were freed and wait for a stream
    seen = foreign({"backward": held}, made("kv_cache", 20 * GIB, VERL, VLLM), allocated_bytes=peak)
    found = estimated_advice(seen)
    assert found[0]["id"] in ("engine_share", "engine_sleep")
    for row in found:
        assert row["peak_after_bytes"] + row["saves_bytes"] <= peak


def test_a_cache_without_an_engine_follows_the_batch() -> None:
    held = {"kv_cache": 9 * GIB, "weights": GIB}
    found = estimated_advice(foreign({"generate": held}))[0]
    assert (found["id"], found["saves_bytes"]) == ("fewer_sequences", 9 * GIB // 2)


def test_two_lines_that_make_nearly_everything_are_named() -> None:
    held = {"activations": 78 * GIB, "weights": GIB // 4}
    inner = "/x/site-packages/torch/nn/functional.py:9 linear"
    lines = [
        made("activations", 40 * GIB, inner, "/home/me/model.py:31 forward"),
        made("activations", 38 * GIB, "/home/me/model.py:44 attend"),
    ]  # fmt: skip
    found = estimated_advice(foreign({"forward": held}, *lines))[0]
    assert found["action"] == (
        "Halve the batch or the length in model.py:31 forward and model.py:44 attend: "
        "78.00 GiB of activations are allocated there"
    )
    assert found["saves_bytes"] == 39 * GIB


def test_a_forward_whose_activations_stay_without_a_backward_is_asked_whether_it_needs_gradients() -> None:
    held = {"activations": 30 * GIB, "weights": 12 * GIB}
    stays = made("activations", 30 * GIB, "/home/me/model.py:31 forward") | {"born_us": 5}
    cut = foreign({"forward": held}, stays)
    first = estimated_advice(cut)[0]
    assert (first["id"], first["saves_bytes"]) == ("no_grad", 27 * GIB)
    # A training that was recorded no further than its first forward looks the same.
    assert first["action"].startswith("If this run only infers")
    assert "if it trains" in first["action"]
    assert "results stay" not in headline_of({**cut, "advice": [first]})["action"]
    inferred = foreign({"forward": held}, {**stays, "stack": [*stays["stack"], "/home/me/run.py:9 generate"]})
    for sure in (inferred, foreign({"forward": held}, stays, pass_returned=True)):
        only = estimated_advice(sure)[0]
        assert (only["id"], only["exact"]) == ("no_grad", True)
        assert only["action"].startswith("Run the forward without gradients")
    freed = estimated_advice(foreign({"forward": held}, stays | {"died_us": 9}))
    trained = estimated_advice(foreign({"forward": held, "backward": {"gradients": GIB}}, stays))
    oom = {"requested_bytes": 1, "device_free_bytes": 0}
    failed = estimated_advice(foreign({"forward": held}, stays) | {"oom": whole_oom(oom)})
    assert "no_grad" not in {e["id"] for e in [*freed, *trained, *failed]}


def test_segments_that_grow_have_their_caveat_beside_a_sleeping_engine() -> None:
    def costs(*stack: str) -> str:
        held = {"weights": 8 * GIB}
        found = foreign({"generate": held}, made("weights", 8 * GIB, *stack), reserved_bytes=12 * GIB)
        return next(c.costs for c in candidates_for(run_of(found)) if c.id == "expandable_segments")

    assert "torch_memory_saver" in costs(VLLM)
    assert "torch_memory_saver" not in costs("/home/me/load.py:3 load")


def test_with_an_engine_that_sleeps_it_is_not_advised() -> None:
    settings = Settings(model="m", generation="vllm", vllm_enable_sleep_mode=True)
    found = report({"forward": {"weights": 8 * GIB}}, settings)
    found["peak"]["reserved_bytes"] = 12 * GIB
    assert run_of(found).idle_bytes
    assert not [c for c in candidates_for(run_of(found)) if c.id == "expandable_segments"]


def test_weights_that_are_only_read_can_be_in_fewer_bits() -> None:
    found = estimated_advice(foreign({"load": {"weights": 11 * GIB}}))
    assert [(e["id"], e["saves_bytes"]) for e in found] == [("smaller_weights", 11 * GIB // 2)]


def row(name: str, saves: float, toll: int, exact: bool = True, peak: str = "allocated") -> dict[str, Any]:
    return {"id": name, "saves_bytes": round(saves * GIB), "toll": toll, "exact": exact, "peak": peak}


@pytest.mark.parametrize(
    ("rows", "first"),
    [
        ([row("most", 10, 4, False), row("same", 5, 1), row("same for less", 4, 0)], "same for less"),
        ([row("most", 10, 4, False), row("same, little", 1, 0)], "most"),
        ([row("most", 30, 4, False), row("rounded", 18, 3, False)], "rounded"),
        ([row("segments", 9, 0, peak="device"), row("same", 5, 1)], "same"),
    ],
)
def test_the_first_thing_keeps_the_training_and_asks_for_least(rows: list[dict[str, Any]], first: str) -> None:
    found = ranked(rows)
    assert found[0]["id"] == first
    rest = [r["saves_bytes"] for r in found[1:]]
    assert rest == sorted(rest, reverse=True)


def test_after_a_failure_the_cheapest_that_is_enough_for_the_step_is_first() -> None:
    rows = [row("QLoRA", 9, 4, False), row("other GPU", 8, 2, False), row("batch", 2, 1), row("little", 0.2, 0)]
    rows += [row("segments", 1, 0, peak="device")]
    oom = {"requested_bytes": GIB // 2, "device_free_bytes": 0, "fits_defragmented": True}
    assert ranked(rows, oom)[0]["id"] == "segments"
    short = {**oom, "ahead": {"short_bytes": GIB}}
    assert ranked(rows, short)[0]["id"] == "batch"
    assert ranked(rows, {**oom, "fits_defragmented": False})[0]["id"] == "batch"


def test_the_sentence_is_row_one_and_nothing_has_to_change_where_there_is_room() -> None:
    found = report({"backward": {"weights": 4 * GIB, "activations": 8 * GIB, "gradients": 4 * GIB}}, None, "cuda")
    found["advice"] = estimated_advice(found)
    found["device_peak"] |= {"reserved_bytes": 16 * GIB, "active_bytes": 16 * GIB, "non_torch_bytes": 0}
    roomy = {**found, "capacity": {"bytes": 80 * GIB, "from": "option"}}
    tight = {**found, "capacity": {"bytes": 17 * GIB, "from": "option"}}
    seen = "64.00 of 80.00 GiB were left in what was seen; no optimizer step is in it."
    assert headline_of(roomy)["action"] == seen
    whole = {**roomy, "phases": [*roomy["phases"], {**roomy["phases"][0], "phase": "optimizer_step"}]}
    assert headline_of(whole)["action"] == "Nothing has to change: 64.00 of 80.00 GiB are left."
    action = found["advice"][0]["action"]
    assert headline_of(tight)["action"].startswith(f"Try first: {action[:1].lower()}{action[1:]}.")


def test_what_costs_nothing_goes_before_what_rounds() -> None:
    rows = [row("8 bits", 6.9, 3, False), row("del", 1.95, 0), row("chunks", 1.97, 1)]
    assert ranked(rows)[0]["id"] == "del"
    assert ranked([*rows, row("checkpoints", 6, 1)])[0]["id"] == "checkpoints"
