"""What is advised: in the framework's own words, never the opposite of right, nothing generic for a known cause."""

from __future__ import annotations

from typing import Any

import pytest

from memprof.oom import explain_log
from memprof.oom.frameworks import frameworks
from tests.oom.examples import EXAMPLES
from tests.oom.test_arithmetic import CAUSES, message


def actions(text: str) -> list[str]:
    (failure,) = explain_log(text)["failures"]
    return [str(row["action"]) for row in failure["try"]]


def example(name: str) -> list[str]:
    return actions(EXAMPLES[name].text)


def test_vllms_two_messages_ask_for_opposite_things() -> None:
    below, no_room = example("vllm.free_below_share"), example("vllm.no_cache_blocks")
    assert below[0] == "lower gpu_memory_utilization to 0.83 or less"  # 5.01 of 6.0 GiB are free
    assert not any(action.startswith("raise") for action in below)
    assert no_room[0] == "raise gpu_memory_utilization"
    assert not any("lower gpu_memory_utilization" in action for action in no_room)


def test_sglangs_two_messages_ask_for_opposite_things() -> None:
    assert example("sglang.no_pool")[0].startswith("raise --mem-fraction-static")
    assert example("sglang.graph_capture")[0].startswith("lower --mem-fraction-static")
    assert not any("lower --mem-fraction-static" in action for action in example("sglang.prefill"))


def test_the_length_that_fits_is_the_first_advice() -> None:
    assert example("vllm.context_too_long")[0] == "max_model_len=566784 or less"
    assert example("vllm.context_over_cache")[0] == "max_model_len=15248 or less"
    no_estimate = EXAMPLES["vllm.context_too_long"].text.split(". Based on")[0]
    assert actions(no_estimate)[0] == "max_model_len=592443 or less"  # 700160 × 5.17 / 6.11


@pytest.mark.parametrize("name", ["vllm.expandable_segments", "torch_memory_saver.expandable_segments"])
def test_expandable_segments_are_taken_off_where_they_are_the_trouble(name: str) -> None:
    assert example(name)[0].startswith("unset PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")


GENERIC = ("halve", "gradient_checkpointing=True", "checkpoint activations", "record the next run")


@pytest.mark.parametrize("name", EXAMPLES)
def test_nothing_generic_where_a_cause_is_known(name: str) -> None:
    """A killed process, an engine or a full /dev/shm is not helped by a smaller micro-batch."""
    (failure,) = explain_log(EXAMPLES[name].text)["failures"]
    if failure["kind"] in ("killed", "host", "cpu", "engine"):
        assert not [action for action in example(name) if action.startswith(GENERIC)]


def test_the_host_is_told_from_the_device() -> None:
    for name in EXAMPLES:
        (failure,) = explain_log(EXAMPLES[name].text)["failures"]
        if failure["kind"] in ("killed", "host", "cpu"):
            assert "expandable_segments" not in " ".join(example(name))


def test_a_request_larger_than_the_card_gets_no_allocator_settings() -> None:
    text = CAUSES["larger than the card"][2]
    assert not any("expandable" in action or "gradient_checkpointing" in action for action in actions(text))
    assert any("flash_attention" in action for action in actions(text))


def test_ranks_that_share_a_device_are_told_apart_from_strangers() -> None:
    assert "LOCAL_RANK" in actions(CAUSES["named, but without figures"][2])[0]
    assert actions(CAUSES["others outweigh a small cache"][2])[0].startswith("nvidia-smi")


PATHS = {
    "TRL": "/site-packages/trl/trainer/grpo_trainer.py",
    "verl": "/site-packages/verl/workers/actor/dp_actor.py",
    "slime": "/root/slime/slime/backends/megatron_utils/loss.py",
    "OpenRLHF": "/site-packages/openrlhf/trainer/ray/ppo_actor.py",
    "Unsloth": "/root/unsloth_compiled_cache/UnslothGRPOTrainer.py",
    "Megatron": "/opt/megatron/core/transformer/mlp.py",
    "DeepSpeed": "/site-packages/deepspeed/runtime/engine.py",
    "Transformers": "/site-packages/transformers/trainer.py",
    "SGLang": "/site-packages/sglang/srt/managers/scheduler.py",
    "vLLM": "/site-packages/vllm/v1/worker/gpu_worker.py",
    "TGI": "/site-packages/text_generation_server/models/flash_causal_lm.py",
    "FlexGen": "/root/flexgen/pytorch_backend.py",
    "NeMo-RL": "/opt/nemo-rl/nemo_rl/models/policy/workers/dtensor_policy_worker_v2.py",
}
MICRO_BATCH = {
    "TRL": "per_device_train_batch_size",
    "verl": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "slime": "--max-tokens-per-gpu",
    "OpenRLHF": "--micro_train_batch_size",
    "Unsloth": "per_device_train_batch_size",
    "Megatron": "--micro-batch-size",
    "DeepSpeed": "train_micro_batch_size_per_gpu",
    "Transformers": "per_device_train_batch_size",
    "SGLang": "--chunked-prefill-size",
    "vLLM": "max_num_batched_tokens",
    "TGI": "--max-batch-prefill-tokens",
    "FlexGen": "--gpu-batch-size",
    "NeMo-RL": "policy.train_micro_batch_size",
}


def test_every_framework_that_is_known_is_tried() -> None:
    assert {names.framework for names in frameworks()} >= set(PATHS) == set(MICRO_BATCH)


@pytest.mark.parametrize("framework", PATHS)
def test_settings_have_the_frameworks_own_names(framework: str) -> None:
    text = (
        'Traceback (most recent call last):\n  File "train.py", line 3, in main\n    x()\n'
        f'  File "{PATHS[framework]}", line 12, in f\n    y = self.model(x)\n'
        '  File "/site-packages/torch/nn/modules/module.py", line 1739, in _call_impl\n    return forward_call()\n'
    ) + message(used="22.9 GiB", allocated="22.40 GiB", cached="100.00 MiB")
    (failure,) = explain_log(text)["failures"]
    assert failure["framework"] == framework
    assert any(MICRO_BATCH[framework] in row["action"] for row in failure["try"])


def in_phase(path: str, function: str) -> dict[str, Any]:
    text = (
        'Traceback (most recent call last):\n  File "train.py", line 3, in main\n    x()\n'
        f'  File "{path}", line 12, in {function}\n    y = z(x)\n'
    ) + message(used="22.9 GiB", allocated="22.40 GiB", cached="100.00 MiB")
    return dict(explain_log(text)["failures"][0])


@pytest.mark.parametrize(
    ("path", "function", "phase", "says"),
    [
        ("/torch/optim/adamw.py", "_multi_tensor_adamw", "optimizer_step", "fused"),
        ("/transformers/generation/utils.py", "_sample", "generate", "fewer sequences"),
        ("/verl/workers/fsdp_workers.py", "compute_log_prob", "old_logprobs", "log_prob_micro_batch_size_per_gpu"),
        ("/transformers/modeling_utils.py", "from_pretrained", "load", "bf16"),
        ("/transformers/trainer.py", "_save_checkpoint", "save", "sharded"),
        ("/vllm/device_allocator/cumem.py", "wake_up", "wake", "empty_cache() before the engine wakes"),
    ],
)
def test_what_is_advised_follows_what_the_run_was_doing(path: str, function: str, phase: str, says: str) -> None:
    failure = in_phase(path, function)
    assert failure["phase"] == phase
    assert any(says in row["action"] for row in failure["try"][:2])
