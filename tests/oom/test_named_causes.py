"""Answers to programs that name their own limit: what they say decides, and so does what the paste shows already."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from memprof.reports.renderers import draw

from memprof.oom.explain import explain_log
from memprof.report.oom import ExplainedFailure


def only(text: str) -> ExplainedFailure:
    (failure,) = explain_log(text).failures
    return failure


@pytest.mark.parametrize("word", ["被杀死", "強制終了しました", "强制终止", "Asesinado", "Matado", "Morto", "Getötet"])
@pytest.mark.parametrize(
    "line", ["{}", "go.sh: línea 7: 41922 {}        python sft.py --bf16", "go.sh：行 7：  41922 {}     python sft.py"]
)
def test_killed_in_the_shells_language(word: str, line: str) -> None:
    assert only(f"loading shards: 50%\n{line.format(word)}\n").cause == "killed"


HOST = [
    (
        "WARN TaskSetManager: ExecutorLostFailure Reason: Container killed by YARN for exceeding memory "
        "limits. 22.3 GB of 22 GB physical memory used.",
        "22.30 GiB of 22.00 GiB",
        "memoryOverhead",
    ),
    (
        "systemd-oomd[812]: Killed /user.slice/vte-spawn-5e.scope due to memory pressure for "
        "/user.slice/user-1000.slice being 62.31% > 50.00% for > 20s with reclaim activity\n"
        "systemd[1888]: vte-spawn-5e.scope: systemd-oomd killed 24 process(es) in this unit.",
        "62.31%, above its limit of 50%",
        "oomctl",
    ),
    (
        "    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n    Limits:\n"
        "      cpu:             8\n      memory:          64Gi\n      nvidia.com/gpu:  1\n",
        "limit of host memory (64.00 GiB)",
        "raise resources.limits.memory above 64.00 GiB",
    ),
    (
        "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.\nExited with exit code 130.\n\n"
        "    CPU time :       412.55 sec.\n    Max Memory :     32768 MB\n    Average Memory :     19422.31 MB\n",
        "at most 32.00 GiB",
        "LSF -M",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "because", "first"), HOST, ids=["yarn", "oomd", "pod", "lsf"])
def test_whoever_ended_the_process_is_named_with_its_figures(text: str, because: str, first: str) -> None:
    failure = only(text)
    assert failure.cause == "killed"
    assert because in failure.because
    assert "kernel killed" not in failure.because
    assert first in failure.suggestions[0].action


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("RuntimeError: unable to open shared memory object </torch_2391_44120_301> in read-write mode: Too many open "
         "files (24)", "open files"),
        ("ResourceExhausted: 429 RESOURCE_EXHAUSTED. You exceeded your current quota", "quota"),
        ("error: *** JOB 55 ON gpu-17 CANCELLED AT 2025-09-30T04:00:21 DUE TO TIME LIMIT ***\n"
         "srun: error: gpu-17: task 0: Killed", "time limit"),
    ],
    ids=["files", "quota", "time"],
)  # fmt: skip
def test_what_is_no_lack_of_memory_is_named(text: str, says: str) -> None:
    explained = explain_log(text)
    assert explained.failures == ()
    assert any(says in note for note in explained.notes)


LIBRARIES = [
    (
        "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 8,192,000,000 bytes (allocated so far: "
        "16,384,512,000 bytes, limit set to: 20,000,000,000 bytes).",
        "limit",
        "may use 18.63 GiB and has allocated 15.26 GiB",
        "CUPY_GPU_MEMORY_LIMIT",
    ),
    (
        "onnxruntime::BFCArena::AllocateRawInternal(size_t, bool, onnxruntime::Stream*) Available memory of 734003200 "
        "is smaller than requested bytes of 1610612736",
        "limit",
        "grow by 700.00 MiB before it reaches its limit .gpu_mem_limit., and 1.50 GiB",
        "raise gpu_mem_limit",
    ),
    (
        '  File "/w/program.py", line 334, in train\n    avg_loss.backward()\n:ResourceExhaustedError: \n\nOut of '
        "memory error on GPU 0. Cannot allocate 1.562500GB memory on GPU 0, 14.312500GB memory has been allocated and "
        "available memory is only 462.937500MB.\n",
        "driver",
        "14.31 GiB are allocated there and 462.94 MiB are available",
        "^a smaller batch",
    ),
    (
        "llama_new_context_with_model: n_ctx      = 131072\nggml_backend_cuda_buffer_type_alloc_buffer: allocating "
        "16384.00 MiB on device 0: cudaMalloc failed: out of memory\nllama_kv_cache_init: failed to allocate buffer "
        "for kv cache\n",
        "driver",
        "KV cache.*131072",
        "^a shorter context",
    ),
    (
        "[TRT] [E] IRuntime::deserializeCudaEngine: Error Code 1: Cuda Runtime (out of memory)\n[TRT] [W] Requested "
        "amount of GPU memory (15062794240 bytes) could not be allocated.",
        "driver",
        "14.03 GiB for an engine's weights",
        "fewer bits",
    ),
    (
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 47.7 GiB for an array with shape (80000, 80000) "
        "and data type float64",
        "host",
        "80000,80000. and data type float64",
        "blocks of rows",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "cause", "because", "first"), LIBRARIES, ids=lambda value: value[:24])
def test_a_librarys_own_figures_decide(text: str, cause: str, because: str, first: str) -> None:
    failure = only(text)
    assert failure.cause == cause
    assert re.search(because, failure.because, re.S)
    assert re.search(first, failure.suggestions[0].action)
    assert not failure.unread


ASKED = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of 39.39 GiB of "
    "which 700.00 MiB is free. Including non-PyTorch memory, this process has 38.70 GiB memory in use. Of the "
    "allocated memory 37.50 GiB is allocated by PyTorch, and 500.00 MiB is reserved by PyTorch but unallocated."
)


def traced(asked: str, *frames: tuple[str, str, str]) -> ExplainedFailure:
    """Explain a failure with these frames: path, function and line of code."""
    lines = [f'  File "/v/site-packages/{path}", line 9, in {name}\n    {code}' for path, name, code in frames]
    return only("\n".join(["Traceback (most recent call last):", *lines, ASKED.format(asked)]))


def actions(failure: ExplainedFailure) -> list[str]:
    return [row.action for row in failure.suggestions]


TRAIN = ("transformers/trainer.py", "train", "return inner_training_loop(")


def test_an_evaluation_is_not_told_to_accumulate_gradients() -> None:
    evaluating = ("transformers/trainer.py", "evaluation_loop", "all_preds.add(logits)")
    padded = (
        "transformers/trainer_pt_utils.py",
        "torch_pad_and_concatenate",
        "result = tensor1.new_full(shape, index)",
    )
    collected = traced("15.66 GiB", TRAIN, evaluating, padded)
    assert "predictions of a whole evaluation" in collected.because
    assert "preprocess_logits_for_metrics" in actions(collected)[0]
    assert "eval_accumulation_steps=1" in actions(collected)
    step = ("transformers/trainer.py", "prediction_step", "outputs = model(**inputs)")
    forward = traced("2.00 GiB", TRAIN, step, ("torch/nn/modules/linear.py", "forward", "return F.linear(input)"))
    assert "per_device_eval_batch_size" in actions(forward)[0]
    for failure in (collected, forward):
        assert not re.search(
            "accumulat\\w+ gradients|gradient_(?:accumulation|checkpointing)", " ".join(actions(failure))
        )


def test_outputs_copied_by_accelerate_are_logits() -> None:
    copied = ("accelerate/utils/operations.py", "_convert_to_fp32", "return tensor.float()")
    failure = traced("9.28 GiB", ("trl/trainer/sft_trainer.py", "compute_loss", "super().compute_loss("), copied)
    assert "[tokens, vocabulary]" in failure.because
    assert "liger" in actions(failure)[0]


def test_no_engine_is_blamed_where_transformers_generates() -> None:
    cache = ("transformers/cache_utils.py", "update", "self.keys = torch.cat([self.keys, key_states], dim=-2)")
    generate = ("trl/trainer/grpo_trainer.py", "_generate_single_turn", "unwrapped_model.generate(")
    assert not re.search("vllm_", " ".join(actions(traced("900.00 MiB", generate, cache))))


def test_weights_in_16_bits_are_not_advised_again() -> None:
    made = (
        "app/run.py",
        "<module>",
        'pipe = FluxPipeline.from_pretrained("F", torch_dtype=torch.bfloat16).to("cuda")',
    )
    moved = ("diffusers/pipelines/pipeline_utils.py", "to", "module.to(device, dtype)")
    failure = traced("900.00 MiB", made, moved, ("torch/nn/modules/module.py", "convert", "return t.to("))
    assert "enable_model_cpu_offload" in actions(failure)[0]
    assert not re.search("bfloat16|tensor.parallel", " ".join(actions(failure)))
    full = traced("900.00 MiB", (*made[:2], made[2].replace("bfloat16", "float32")), moved)
    assert "torch.bfloat16" in " ".join(actions(full))


def test_nothing_is_advised_twice() -> None:
    states = ("torch/distributed/fsdp/_state_dict_utils.py", "_full_post_state_dict_hook", "state_dict[n].clone()")
    saving = ("app/trainer.py", "save_checkpoint", "cpu_state = model.state_dict()")
    assert sum("SHARDED_STATE_DICT" in row for row in actions(traced("1.96 GiB", saving, states))) == 1
    eager = (
        "transformers/models/gemma2/modeling_gemma2.py",
        "eager_attention_forward",
        "softmax(attn_weights, dim=-1)",
    )
    assert sum("smaller batch" in row for row in actions(traced("32.00 GiB", eager))) == 1


@pytest.mark.parametrize(("in_use", "shared"), [(8589934592, True), (41949672960, False)])
def test_a_pool_far_below_its_limit_is_not_what_is_full(in_use: int, shared: bool) -> None:
    failure = only(
        "bfc_allocator.cc:485] Allocator (GPU_0_bfc) ran out of memory trying to allocate 1.50GiB (rounded to "
        f"1610612736)requested by op AddV2\nStats:\nLimit:   42949672960\nInUse:   {in_use}\nMaxInUse:   8600000000\n"
    )
    assert ("Another process uses the rest" in failure.because) == shared
    assert ("nvidia-smi" in actions(failure)[0]) == shared


def test_sentences_are_well_formed() -> None:
    failed = (
        "ResourceExhaustedError: OOM when allocating tensor with shape[64,512,768] and type float on /job:localhost"
    )
    assert "shape (64,512,768) on" in only(failed).because
    drawn = draw("oom", explain_log(ASKED.format("900.00 MiB")[: ASKED.index(" of which")]))
    assert "Try first: nvidia-smi" in drawn
    assert "?." not in drawn


@pytest.mark.parametrize(
    "wrap",
    [
        lambda text: {"error": {"message": text, "type": "ServerError"}, "status": 500},
        lambda text: {"data": {"result": [{"stream": {"pod": "a"}, "values": [["1760000000", text]]}]}},
        lambda text: {"ts": 1, "fields": {"exception": {"value": f'Traceback:\n  File "a.py"\n{text}'}}},
    ],
    ids=["error body", "Loki", "fields"],
)
def test_texts_further_inside_a_json_line_are_read(wrap: Callable[[str], dict[str, object]]) -> None:
    failure = only(json.dumps(wrap(ASKED.format("2.00 GiB"))))
    assert (failure.cause, failure.requested_bytes) == ("full", 2 * 2**30)
