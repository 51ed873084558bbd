"""What is advised: in the framework's own words, never the opposite of right, nothing generic for a known cause."""

from __future__ import annotations

import pytest

from memprof.oom.explain import explain_log
from memprof.oom.framework_settings import frameworks
from memprof.report.oom import ExplainedFailure
from tests.oom.test_arithmetic import CAUSES, message
from tests.oom.wordings import EXAMPLES


def actions(text: str) -> list[str]:
    (failure,) = explain_log(text).failures
    return [str(row.action) for row in failure.suggestions]


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
    (failure,) = explain_log(EXAMPLES[name].text).failures
    if failure.kind in ("killed", "host", "cpu", "engine"):
        assert not [action for action in example(name) if action.startswith(GENERIC)]


def test_the_host_is_told_from_the_device() -> None:
    for name in EXAMPLES:
        (failure,) = explain_log(EXAMPLES[name].text).failures
        if failure.kind in ("killed", "host", "cpu"):
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
    (failure,) = explain_log(text).failures
    assert failure.framework == framework
    assert any(MICRO_BATCH[framework] in row.action for row in failure.suggestions)


def in_phase(path: str, function: str) -> ExplainedFailure:
    text = (
        'Traceback (most recent call last):\n  File "train.py", line 3, in main\n    x()\n'
        f'  File "{path}", line 12, in {function}\n    y = z(x)\n'
    ) + message(used="22.9 GiB", allocated="22.40 GiB", cached="100.00 MiB")
    return explain_log(text).failures[0]


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
    assert failure.phase == phase
    assert any(says in row.action for row in failure.suggestions[:2])


FULL_CARD = message(free="10.00 MiB", used="23.5 GiB", allocated="22.0 GiB", cached="1.20 GiB")
GAPS = message(used="22.9 GiB", allocated="18.0 GiB", cached="4.50 GiB")
OLD_GAPS = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.69 GiB total capacity; 18.10 GiB already "
    "allocated; 1.00 GiB free; 22.35 GiB reserved in total by PyTorch)"
)


@pytest.mark.parametrize(
    ("before", "text", "first"),
    [
        ("", GAPS, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n", GAPS, "torch_empty_cache_steps"),
        ("", OLD_GAPS, "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512"),
        ("C:\\Users\\me\\train.py\n", GAPS, "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512"),
        ("enable_sleep_mode=True\n", GAPS, "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512"),
        ("torch==2.5.1\n", GAPS.replace("CUDA", "HIP"), "PYTORCH_HIP_ALLOC_CONF=max_split_size_mb:512"),
    ],
)
def test_what_is_impossible_or_set_already_is_left_out(before: str, text: str, first: str) -> None:
    found = actions(before + text)
    assert found[0].startswith(first)
    if before or text is OLD_GAPS:
        assert not any("expandable_segments:True" in action for action in found)


def at(code: str, text: str, path: str = "/home/me/loss.py", function: str = "loss") -> ExplainedFailure:
    trace = f'Traceback (most recent call last):\n  File "{path}", line 12, in {function}\n    {code}\n'
    return explain_log(trace + text).failures[0]


LARGE = message("9.00 GiB", "7.00 GiB", used="16.0 GiB", allocated="13.0 GiB", cached="2.50 GiB")


@pytest.mark.parametrize(
    ("code", "path", "function", "reason", "first"),
    [
        ("lp = logits.log_softmax(-1)", "/home/me/loss.py", "loss", "wide_logits", "compute log-probabilities in"),
        ("w = torch.softmax(attn_scores, -1)", "/home/me/m.py", "attend", "attention_scores", "attn_implementation="),
        ("x = x.float()", "/home/me/m.py", "cast", "fragmentation", "avoid that copy"),
        ("s = clone(p)", "/site-packages/torch/distributed/fsdp/_state_dict_utils.py", "_full_post_state_dict_hook",
         "full_state_dict", "gather on the CPU"),
        ("d = self.flatten(b)", "/site-packages/deepspeed/runtime/zero/stage_1_and_2.py", "reduce_ipg_grads",
         "reduction", "lower zero_optimization.reduce_bucket_size"),
    ],
)  # fmt: skip
def test_what_the_traceback_names_comes_first(code: str, path: str, function: str, reason: str, first: str) -> None:
    failure = at(code, LARGE, path, function)
    assert failure.suggestions[0].action.startswith(first), failure.suggestions[0]
    assert failure.reason == reason


def test_more_than_the_device_has_is_said_and_gaps_are_not_the_cause() -> None:
    (failure,) = explain_log(message("30.00 MiB", "0 bytes", "11.00 GiB", None, "16.98 GiB", "696.00 MiB")).failures
    assert (failure.cause, failure.reason) == ("full", "more_than_device")
    assert "154%" in failure.because


def test_a_size_above_any_device_is_no_lack_of_memory() -> None:
    text = "failed to allocate 127.99TiB (140729850295296 bytes) from device: HIP_ERROR_OutOfMemory"
    (failure,) = explain_log(text).failures
    assert "more than any device has" in failure.because
    assert failure.suggestions[0].action.startswith("check that the library's version")


@pytest.mark.parametrize(
    "word", ["micro_batch_size_per_gpu: 1", "per_device_train_batch_size=1", "micro_batch -> 1", "--train_batch_size=1"]
)
def test_a_micro_batch_of_one_is_not_halved(word: str) -> None:
    found = actions(f"{word}\n{FULL_CARD}")
    assert not any("halve" in action for action in found)


def test_contexts_of_other_ranks_are_not_what_fills_a_full_card() -> None:
    others = "".join(f"Process {n} has 398.00 MiB memory in use. " for n in range(4))
    text = message("136.00 MiB", "93.81 MiB", "23.65 GiB", "21.98 GiB", "21.51 GiB", "2.30 MiB", others)
    (failure,) = explain_log(text).failures
    assert failure.cause == "full"
    assert "about one CUDA context each" in failure.because


def test_the_task_of_ray_tells_the_phase_where_no_frame_does() -> None:
    task = (
        "ray::WorkerDict.actor_rollout_generate_sequences() (pid=1, repr=<verl.single_controller.ray.base.WorkerDict>)"
    )
    (failure,) = explain_log(f"{FULL_CARD}\n{task}").failures
    assert failure.phase == "generate"
    assert "rollout" in failure.suggestions[0].action


# Texts of 2019 to 2026 that nobody had looked at, and what was said of them first.


def first_of(text: str) -> tuple[str, str]:
    (failure,) = explain_log(text).failures
    return failure.cause, failure.suggestions[0].action


def test_compute_buffers_do_not_shrink_with_the_layers_on_the_device() -> None:
    refused = "allocating 279356.51 MiB on device 0: cudaMalloc failed: out of memory\n"
    assert first_of(refused + "failed to allocate CUDA0 buffer")[1].startswith("fewer layers")
    assert "-ub" in first_of(refused + "llama_new_context_with_model: failed to allocate compute buffers")[1]


def test_a_share_that_is_nearly_the_whole_card_is_not_raised() -> None:
    text = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.\n"
    assert first_of(text)[1].startswith("raise ")
    assert not first_of(text + "python -m vllm --gpu-memory-utilization 0.95")[1].startswith("raise ")


def test_torch_1_is_not_told_what_it_lacks() -> None:
    """Its wording tells the version: "cached" instead of "reserved" is 1.3 or older."""
    old = "RuntimeError: CUDA out of memory. Tried to allocate {} (GPU 0; {} total capacity; {} already allocated; {})"
    full = old.format("24.00 MiB", "3.95 GiB", "3.46 GiB", "1.06 MiB free; 60.00 KiB cached")
    gaps = old.format("182.00 MiB", "7.79 GiB", "6.52 GiB", "127.31 MiB free; 69.56 MiB cached")
    for text in (full, gaps):
        (failure,) = explain_log(text).failures
        tried = " ".join(row.action for row in failure.suggestions)
        assert "quantization_config" not in tried
        assert "garbage_collection_threshold" not in tried
        assert "max_split_size_mb" not in tried


def test_what_a_context_and_a_desktop_hold_is_not_nobodys() -> None:
    text = (
        "RuntimeError: CUDA out of memory. Tried to allocate 182.00 MiB (GPU 0; 7.79 GiB total capacity; 6.52 GiB "
        "already allocated; 127.31 MiB free; 69.56 MiB cached)"
    )
    assert first_of(text)[0] != "unexplained"
    empty = text.replace("6.52 GiB", "2.52 GiB")
    assert first_of(empty)[0] == "unexplained"


# Fifty more, most of 2023 to 2026: what was said first of each, by what went wrong.

ROCM = message("16.00 GiB", "15.09 GiB", "15.24 GiB", None, "0 bytes", "0 bytes", backend="HIP")
STAGE3 = "/site-packages/deepspeed/runtime/zero/stage3.py"


def tried(text: str) -> str:
    (failure,) = explain_log(text).failures
    return " | ".join(row.action for row in failure.suggestions)


def test_what_was_done_is_not_guessed() -> None:
    """A bare message may be inference: gradients to accumulate are proposed where training shows."""
    assert first_of(FULL_CARD)[1] == "a smaller batch, or shorter or smaller inputs"
    assert "for training:" in tried(FULL_CARD)
    assert "accumulate gradients" in first_of(f"trainer.train()\n{FULL_CARD}")[1]
    phase = at("x = f(y)", FULL_CARD, "/site-packages/torch/autograd/__init__.py", "backward").suggestions
    assert "accumulate gradients" in phase[0].action


@pytest.mark.parametrize(
    ("before", "framework"),
    [
        ("(NPURayWorkerWrapper pid=45464) ", "vLLM"),
        ("(RayWorkerWrapper pid=206994, ip=192.168.10.25) ", "vLLM"),
        ("Set vram state to: HIGH_VRAM\nRequested to load Flux\n", "ComfyUI"),
        ("[TensorRT-LLM][INFO] Loaded engine size: 15388 MiB\n", "TensorRT-LLM"),
    ],
)
def test_the_names_that_a_program_gives_itself_tell_whose_run_it_was(before: str, framework: str) -> None:
    (failure,) = explain_log(before + FULL_CARD).failures
    assert failure.framework == framework
    assert not any("gradient" in row.action for row in failure.suggestions)


def test_a_driver_beside_an_engine_is_answered_in_the_engines_words() -> None:
    assert "max_num_batched_tokens" in first_of("INFO vllm worker\nRuntimeError: CUDA error: out of memory")[1]
    assert "nvidia-smi" in first_of("RuntimeError: CUDA error: out of memory")[1]


def test_a_flag_without_a_value_is_set() -> None:
    text = f"accelerate launch train_mine.py --gradient_checkpointing{{}} --resolution=512\n{FULL_CARD}"
    assert "checkpoint activations" not in tried(text.format(""))
    assert "checkpoint activations" in tried(text.format(" false"))


def test_digits_of_the_next_lines_prefix_are_no_part_of_a_number() -> None:
    line = "2024-Jul-30 14:22:30.244701 65191:65191 ERROR  TDRV:dmem_alloc_internal  Failed to alloc DEVICE memory: 104"
    (failure,) = explain_log(f"{line}\n{line.replace('104', 'x')}").failures
    assert failure.requested_bytes == 104


def test_so_few_bytes_are_not_the_communicators_own() -> None:
    asks = "node3:871:1023 [2] include/alloc.h:206 NCCL WARN Failed to CUDA calloc async {} bytes"
    assert first_of(asks.format(24))[1].startswith("leave about 1 GiB")
    assert first_of(asks.format(6291456))[1].startswith("fewer communicators")


def test_the_optimizers_sub_group_is_what_zero_3_steps_at_a_time() -> None:
    failure = at("self.optimizer.step()", GAPS, STAGE3, "_optimizer_step")
    assert "sub_group_size" in failure.suggestions[0].action


def test_a_device_that_is_a_part_of_the_machines_memory_can_be_given_more() -> None:
    assert first_of(f"gfx1151, 128GB\n{ROCM}")[1].startswith("give the GPU a larger part")
    assert first_of(ROCM)[1].startswith("find the tensor")


def test_no_decoder_is_tiled_while_weights_are_loaded() -> None:
    place = "/root/ComfyUI/comfy/model_patcher.py"
    failure = at("w = cast(weight)", "torch.OutOfMemoryError: Allocation on device", place, "patch_weight_to_device")
    assert "fp8 or GGUF" in failure.suggestions[0].action
    failure = at("x = self.decode(z)", "torch.OutOfMemoryError: Allocation on device", "/root/ComfyUI/vae.py", "decode")
    assert "Tiled" in failure.suggestions[0].action


def test_an_engines_own_count_below_zero_is_its_failure() -> None:
    kept = "model weights take 5.20GiB; non_torch_memory takes 0.03GiB; PyTorch activation peak memory takes 1.42GiB; "
    (failure,) = explain_log(f"{kept}the rest of the memory reserved for KV Cache is -1.05GiB.").failures
    assert "exceed the share by 1.05 GiB" in failure.because
    assert failure.suggestions[0].action.startswith("raise gpu_memory_utilization")
    assert not explain_log(f"{kept}the rest of the memory reserved for KV Cache is 1.05GiB.").failures
    assert not explain_log("# cuda blocks: 4681, # CPU blocks: 0").failures
    tokens = "max_total_tokens=131072 is larger than the profiled value {}. Use the profiled value instead."
    (failure,) = explain_log(tokens.format(-561981)).failures
    assert "-561981 tokens" in failure.because
    assert not explain_log(tokens.format(98304)).failures


def test_a_cards_figures_that_an_engine_prints_in_gib_are_bytes_in_the_answer() -> None:
    text = "Free memory on device (5.01/6.0 GiB) on startup is less than desired GPU memory utilization (0.9, 5.4 GiB)"
    (failure,) = explain_log(text).failures
    assert (failure.device_total_bytes, failure.device_free_bytes) == (6 * 2**30, round(5.01 * 2**30))


def test_the_right_edge_of_a_rich_log_is_no_part_of_a_message() -> None:
    """Rich's handler prints file and line beside a message's first line, between two halves of it."""
    head, rest = FULL_CARD[:70], FULL_CARD[70:]
    (failure,) = explain_log(f"{head}{' ' * 12}train.py:431\n{rest}").failures
    assert failure.requested_bytes == explain_log(FULL_CARD).failures[0].requested_bytes
    assert failure.device_total_bytes is not None
    assert explain_log(f"!!! Exception during processing !!! Allocation on device{' ' * 20}execution.py:430").failures


def test_a_merge_of_an_adapter_is_moved_to_the_host_in_the_frameworks_words() -> None:
    cell = """
OutOfMemoryError                          Traceback (most recent call last)
Cell In[21], line 2
----> 2 {line}

File {file}, in {function}(model)
"""
    own = cell.format(
        line="model.save_pretrained_merged(folder, tokenizer)",
        file="/usr/lib/python3.11/site-packages/unsloth/save.py:1298",
        function="unsloth_save_pretrained_merged",
    )
    assert actions(own)[0].startswith("maximum_memory_usage=0.5")
    reload = cell.format(
        line="base = AutoModelForCausalLM.from_pretrained(name)  # then model.merge_and_unload()",
        file="/usr/lib/python3.11/site-packages/transformers/models/auto/auto_factory.py:493",
        function="from_pretrained",
    )
    first, second = actions(reload)[:2]
    assert "device_map='cpu'" in first
    assert "del the trainer" in second
    assert not any("state_dict" in action for action in [*actions(own), *actions(reload)])


@pytest.mark.parametrize(
    ("command", "outsider"), [("python train/rewards.py --port 7", True), ("ray::Actor.fit", False)]
)
def test_rays_table_of_processes_names_who_holds_the_node(command: str, outsider: bool) -> None:
    table = f"PID\tMEM(GB)\tCOMMAND\n14\t176.97\t{command}\n8805\t8.80\tray::LLMRayActor\n"
    (failure,) = explain_log(f"{EXAMPLES['ray.monitor'].text} Top 10 memory users:\n{table}").failures
    named = command.partition(" --")[0]
    assert f"used 176.97 GiB: {named}." in failure.because
    assert (failure.suggestions[0].action == f"move or shrink {named}") is outsider
    assert named in failure.suggestions[0].action


def test_rays_table_decides_what_comes_first() -> None:
    table = "PID\tMEM(GB)\tCOMMAND\n14\t{}\tray::TaskRunner.run\n8805\t0.80\tray::LLMRayActor\n"
    text = f"{EXAMPLES['ray.monitor'].text} Top 10 memory users:\n{table}"
    assert tried(text.format("229.84")).startswith("keep less data in ray::TaskRunner.run")
    assert "TaskRunner" not in tried(text.format("1.20"))
    backwards = "\n".join(reversed(text.format("229.84").split("\n")))
    (failure,) = explain_log(backwards).failures
    assert "used 229.84 GiB: ray::TaskRunner.run" in failure.because


def test_the_graph_allocator_of_llama_cpp_is_told_from_its_weights() -> None:
    first = "allocating 9866.00 MiB on device 1: cudaMalloc failed: out of memory"
    assert actions(f"{first}\nggml_gallocr_reserve_n: failed to allocate CUDA1 buffer")[0].startswith(
        "a smaller physical"
    )
    assert actions(f"{first}\nalloc_tensor_range: failed to allocate CUDA1 buffer")[0].startswith("fewer layers")


def test_a_warm_up_is_helped_first_by_a_smaller_prefill() -> None:
    text = 'router: Unable to warmup model: Generation("' + message(
        asked="4.00 GiB", free="10.00 MiB", allocated="23.50 GiB", cached="100.00 MiB"
    )
    found = actions(text + '") Error: WebserverFailed text_generation_launcher')
    assert found[0] == "lower --max-batch-prefill-tokens"


def test_an_engine_loads_weights_as_they_are_stored() -> None:
    text = (
        'Traceback (most recent call last):\n  File "/site-packages/vllm/model_executor/layers/linear.py", line 5, in '
        "create_weights\n    w = torch.empty(n)\n"
    )
    found = actions(text + message(used="23.8 GiB", allocated="23.50 GiB", cached="20.00 MiB"))
    assert not any(action.startswith("load in bf16") for action in found)


def test_a_model_published_by_unsloth_is_no_run_of_unsloth() -> None:
    pipeline = 'pipe = DiffusionPipeline.from_pretrained("unsloth/Qwen-Image-unsloth-bnb-4bit")\n'
    trainer = 'model = FastLanguageModel.from_pretrained("unsloth/Qwen3-4B")\n'
    for text, framework in ((pipeline, "diffusers"), (trainer, "Unsloth")):
        (failure,) = explain_log(text + message(free="10.00 MiB")).failures
        assert failure.framework == framework
