"""Forms that were once read wrongly: in other words than the example of their form, or as what they are not."""

from __future__ import annotations

import pytest
from memprof.reports.renderers import draw

from memprof.oom.explain import explain_log

OUT = "Tried to allocate 22.00 MiB (NPU 0; 60.97 GiB total capacity; 10.24 GiB already allocated; 10.24 GiB current "
NPU = f"RuntimeError: NPU out of memory. {OUT}active; 19.52 MiB free; 10.65 GiB reserved in total by PyTorch)"
XPU = (
    "torch.OutOfMemoryError: XPU out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 15.11 GiB. Of "
    "the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
)
SGLANG = (
    "Exception: Capture cuda graph failed: {what}\nPossible solutions:\n1. set --mem-fraction-static to a smaller value"
)


@pytest.mark.parametrize(
    ("text", "tool", "variable"),
    [
        (NPU, "npu-smi", "ASCEND_RT_VISIBLE_DEVICES"),
        (NPU.replace("NPU out", "HIP out"), "rocm-smi", "HIP_VISIBLE_DEVICES"),
        (NPU.replace("NPU out", "XPU out"), "xpu-smi", "ZE_AFFINITY_MASK"),
        (NPU.replace("NPU out", "CUDA out"), "nvidia-smi", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_tools_are_the_backends_own(text: str, tool: str, variable: str) -> None:
    (failure,) = explain_log(text).failures
    said = " ".join(row.action + row.why for row in failure.suggestions)
    assert failure.cause == "unexplained"
    assert tool in said
    assert variable in said
    assert (tool == "nvidia-smi") == ("nvidia-smi" in said)


@pytest.mark.parametrize(("asked", "cause"), [("4.00 GiB", "refused"), ("3.90 GiB", "unexplained")])
def test_level_zeros_limit_includes_a_block_of_just_that_size(asked: str, cause: str) -> None:
    (failure,) = explain_log(XPU.format(asked=asked)).failures
    assert failure.cause == cause


def test_a_graph_that_fails_for_another_reason_is_not_about_memory() -> None:
    """SGLang lists the same solutions, with memory settings among them, whatever the failure was."""
    assert explain_log(SGLANG.format(what="an illegal memory access was encountered")).failures == ()
    (failure,) = explain_log(SGLANG.format(what="CUDA out of memory.")).failures
    assert failure.form == "sglang.graph_capture"


@pytest.mark.parametrize(
    ("text", "form", "requested"),
    [
        (
            "[PID: 2109] Memory_Allocation_Failure(EL0004): Failed to allocate memory requested by GE module.\n"
            "        Possible Cause: Available memory is insufficient.\n        TraceBack (most recent call last):\n"
            "        Call rtMalloc fail, purpose: page caching, type = 2, size:3221291008, device_id:0[FUNC:Alloc]",
            "npu.driver",
            3221291008,
        ),
        ("[enforce fail at CPUAllocator.cpp:56] posix_memalign(&data, gAlignment) == 0. 12 vs 0", "torch.cpu", None),
        ('{"message":"Call to wake_up method failed: CUDA Error: out of memory at <path>:163"}', "vllm.wake", None),
    ],
)  # fmt: skip
def test_other_words_for_the_same(text: str, form: str, requested: int | None) -> None:
    (failure,) = explain_log(text).failures
    assert (failure.form, failure.requested_bytes) == (form, requested)


@pytest.mark.parametrize(
    ("text", "phase"),
    [
        ("RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62", "wake"),
        ("[torch_memory_saver.cpp] cudaError error: 2 (out of memory) file=csrc/core.cpp func=resume line=17", "wake"),
        ("[torch_memory_saver.cpp] CUresult error: 2 (out of memory)  file=csrc/utils.h func=cu_mem_create", None),
        ("AssertionError: Memory usage increased after sleeping.", "sleep"),
    ],
)  # fmt: skip
def test_some_messages_alone_say_what_the_engine_was_doing(text: str, phase: str | None) -> None:
    (failure,) = explain_log(text).failures
    assert failure.phase == phase


def test_a_device_whose_size_is_not_told_has_no_negative_memory_in_use() -> None:
    text = "torch.OutOfMemoryError: Tried to allocate 12.60 GiB. GPU had 12.44 GiB free of 79.19"
    (failure,) = explain_log(text).failures
    assert "-" not in failure.because
    assert "does not say how large the device is" in failure.because


def test_two_bare_messages_of_two_tracebacks_are_two_failures() -> None:
    head = 'Traceback (most recent call last):\n  File "train.py", line 3, in main\n    x()\n'
    first, second = "RuntimeError: CUDA error: out of memory\n", "RuntimeError: CUDA driver error: out of memory\n"
    chained = "\nDuring handling of the above exception, another exception occurred:\n\n"
    assert len(explain_log(head + first + "retrying\n" + head + second).failures) == 2
    assert len(explain_log(head + first + chained + head + second).failures) == 1
    assert len(explain_log(head + first + second).failures) == 1


@pytest.mark.parametrize("end", ["\n16 nodes are left", "\n\n16 nodes are left", " in all", ""])
def test_a_number_at_a_messages_end_takes_no_digits_of_the_next_line(end: str) -> None:
    """It was read as 409616 bytes."""
    text = f"ERROR: Failed to allocate memory for requested buffer of size 4096{end}\n"
    (failure,) = explain_log(text).failures
    assert failure.requested_bytes == 4096
    assert "16" not in failure.message


def test_other_actors_of_a_ray_run_are_not_to_be_ended() -> None:
    """Another process on the device may be the run's own engine."""
    text = (
        "CUDA out of memory. Tried to allocate 4.64 GiB. GPU 0 has a total capacity of 79.11 GiB of which 3.90 GiB is "
        "free. Process 30011 has 52.20 GiB memory in use. Process 29001 has 22.98 GiB memory in use. Of the allocated "
        "memory 48.30 GiB is allocated by PyTorch, and 2.66 GiB is reserved by PyTorch but unallocated."
    )
    (alone,) = explain_log(text).failures
    (failure,) = explain_log(f"(PolicyModelActor pid=30011) {text}").failures
    assert alone.suggestions[0].action == "nvidia-smi: end processes that are left over from an earlier run"
    assert failure.cause == alone.cause == "other_processes"
    assert not any(row.action.startswith("nvidia-smi: end processes") for row in failure.suggestions)


def test_a_line_of_its_own_is_found_behind_another() -> None:
    (failure,) = explain_log("failed\nrun.sh: line 12: 88213 Killed                  python train.py").failures
    assert failure.form == "shell.killed"


def test_a_size_that_no_part_of_the_answer_uses_is_named() -> None:
    text = (
        "XlaRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.91G of 15.75G hbm. "
        "Exceeded hbm capacity by 3.16G.\n\nTotal hbm usage >= 19.16G:\n    reserved        258.00M\n"
    )
    answer = explain_log(text)
    (failure,) = answer.failures
    assert [(figure.text, figure.label) for figure in failure.unread] == [
        ("19.16G", "Total hbm usage"),
        ("258.00M", "reserved"),
    ]
    assert "Not used by this answer: 19.16G (Total hbm usage, line 3), 258.00M (reserved, line 4)." in draw(
        "oom", answer
    )


@pytest.mark.parametrize(
    "text",
    [
        '@@ -31,6 +31,8 @@ def run(batch):\n     try:\n+    except torch.OutOfMemoryError:\n'
        '+        logger.warning("CUDA out of memory. Tried to allocate 2.00 GiB")\n+   Killed\n',
        '```diff\n+a run stops with a bare\n+   Killed\n+``RuntimeError: CUDA out of memory`` of the GPU\n```\n',
        '$ grep -rn "out of memory" .\nutils/memory.py:77:        "CUDA out of memory.",  # CUDA OOM\n'
        "docs/errors.md:12:- `torch.OutOfMemoryError: CUDA out of memory`\n",
        '    _statements = [\n        "DefaultCPUAllocator: can\'t allocate memory",  # CPU OOM\n    ]\n',
        '    except RuntimeError as error:\n        if "CUDA out of memory" in str(error):\n            retry()\n',
        'if (\n    state.terminated.reason\n    == "OOMKilled"\n):\n',
    ],
)  # fmt: skip
def test_what_sources_diffs_and_grep_print_is_no_failure(text: str) -> None:
    assert explain_log(text).failures == ()


def test_a_traceback_cut_off_in_its_line_of_code_is_a_failure() -> None:
    text = (
        '  File "/vllm/v1/core/kv_cache_utils.py", line 699, in check_enough_kv_cache_memory\n'
        '    raise ValueError("No available memory for the cache blocks. "\n'
        '                     "Try increasing `gpu_memory_utilization` when "\n'
    )
    (failure,) = explain_log(text).failures
    assert failure.form == "vllm.no_cache_blocks"


def test_tensorflows_dump_between_two_messages_does_not_make_them_two_failures() -> None:
    dump = "\n".join(f"bfc_allocator.cc:1105] InUse at 7f{i:06x} of size 256 next {i}" for i in range(120))
    text = (
        "Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.25GiB (rounded to 2415919104)"
        f"\n{dump}\nResourceExhaustedError: OOM when allocating tensor with shape[64,96,256,384] and type float\n"
    )
    (failure,) = explain_log(text).failures
    assert (failure.requested_bytes, failure.facts["shape"]) == (2415919104, "64,96,256,384")


GENERATING = """  File "/root/eval.py", line 61, in <module>
    out = model.generate(**batch, max_new_tokens=4096)
  File "/lib/python3.10/site-packages/transformers/generation/utils.py", line 3255, in _sample
    outputs = model_forward(**model_inputs, return_dict=True)
  File "/lib/python3.10/site-packages/transformers/cache_utils.py", line 557, in update
    self.key_cache[layer_idx] = torch.cat([self.key_cache[layer_idx], key_states], dim=-2)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 412.00 MiB. GPU 0 has a total capacity of 39.38 GiB of \
which 141.44 MiB is free. This process has 39.23 GiB memory in use. Of the allocated memory {live} GiB is allocated by \
PyTorch, and {idle} GiB is reserved by PyTorch but unallocated."""


@pytest.mark.parametrize(
    ("live", "idle", "cause", "first"),
    [(31.71, 6.91, "full", "generate fewer"), (18.02, 20.60, "fragmentation", "expandable_segments")],
)
def test_a_growing_cache_on_a_full_device_is_not_fragmentation(
    live: float, idle: float, cause: str, first: str
) -> None:
    (failure,) = explain_log(GENERATING.format(live=live, idle=idle)).failures
    assert failure.cause == cause
    assert first in failure.suggestions[0].action
    assert any("expandable_segments" in row.action for row in failure.suggestions)


def test_an_optimizer_that_copies_the_weights_is_not_helped_by_a_smaller_batch() -> None:
    text = (
        '  File "/root/train_sft.py", line 184, in <module>\n    trainer = SFTTrainer(model=model,\n'
        '  File "/lib/colossalai/zero_wrapper.py", line 105, in zero_optim_wrapper\n    return Optim(optim)\n'
        '  File "/lib/colossalai/zero/low_level_optim.py", line 175, in __init__\n    fp32 = fp16.float()\n'
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 25.10 GiB (GPU 0;"
    )
    (failure,) = explain_log(text).failures
    assert "while the optimizer was created" in failure.because
    assert "offload the optimizer state" in failure.suggestions[0].action


def test_nothing_accumulates_gradients_where_nothing_trains() -> None:
    text = 'File "torch/nn/modules/linear.py", line 116, in forward\n    return F.linear(input, self.weight)\n{}'
    error = "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    (infers,) = explain_log(text.format(error)).failures
    (trains,) = explain_log(f"loss.backward()\n{text.format(error)}").failures
    assert "gradient" not in infers.suggestions[0].action
    assert "gradient" in trains.suggestions[0].action


@pytest.mark.parametrize("columns", ["{}", '2025-03-01T10:00:00Z,ERROR,"{}"'])
def test_csv_keeps_the_frames(columns: str) -> None:
    """A field doubles its quotes; each line may be a row."""
    rows = GENERATING.format(live=31.71, idle=6.91).replace('"', '""').split("\n")
    (failure,) = explain_log("\n".join(map(columns.format, rows))).failures
    assert failure.phase == "generate"
    assert failure.frame == "/root/eval.py:61 <module>"
