"""What a message alone does not tell: the frames that asked, the process's name, a container's state, Ray's repeats."""

from __future__ import annotations

import pytest

from memprof.oom.explain import explain_log
from memprof.oom.knowledge_files import table
from memprof.oom.reading.engine_share import engine_shares
from memprof.oom.reading.regions import regions

PYTHON = "/usr/lib/python3.10/site-packages"
WAKE = (
    f'(ActorModelRayActor pid=7)   File "{PYTHON}/vllm/device_allocator/cumem.py", line 207, in wake_up\n'
    "(ActorModelRayActor pid=7)     create_and_map(handle)\n"
    f'(ActorModelRayActor pid=7)   File "{PYTHON}/vllm/device_allocator/cumem.py", line 75, in create_and_map\n'
    "(ActorModelRayActor pid=7)     python_create_and_map(*allocation_handle)\n"
    "(ActorModelRayActor pid=7) RuntimeError: CUDA Error: out of memory\n"
)
PINNED = (
    f'  File "{PYTHON}/deepspeed/accelerator/cuda_accelerator.py", line 296, in pin_memory\n'
    "    return tensor.pin_memory()\nRuntimeError: CUDA error: out of memory\n"
)
SAVER = "[torch_memory_saver.cpp] CUresult error: 2 (out of memory)  file=csrc/utils.h func=cu_mem_create line=194"
RAY = (
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n\nMemory on the node "
    "(IP: 172.31.69.247, ID: 5bf8) where the task was running was 54.86GB / 57.60GB (0.952354), which exceeds the "
    "memory usage threshold of 0.95."
)


@pytest.mark.parametrize(
    ("text", "form", "kind", "framework"),
    [
        (WAKE, "vllm.wake", "engine", "OpenRLHF"),
        (PINNED, "pinned", "host", "DeepSpeed"),
        (PINNED.replace("in pin_memory", "in move").replace("return ", "x = "), "pinned", "host", "DeepSpeed"),
        (PINNED.replace("pin_memory", "to"), "cuda.driver", "driver", "DeepSpeed"),
    ],
)
def test_the_frames_that_asked_tell_what_the_driver_does_not(text: str, form: str, kind: str, framework: str) -> None:
    (failure,) = explain_log(text).failures
    assert (failure.form, failure.kind, failure.framework) == (form, kind, framework)


def test_rays_names_of_processes_tell_whose_run_it_was() -> None:
    text = f"(SGLangHttpServer pid=25) {SAVER}\n(WorkerDict pid=20) WARNING: resume_memory_occupation timed out"
    (failure,) = explain_log(text).failures
    assert failure.framework == "verl"
    assert "actor_rollout_ref.rollout.gpu_memory_utilization" in " ".join(row.action for row in failure.suggestions)


def test_what_ray_says_it_repeats_is_told_once() -> None:
    repeated = f"(SGLangHttpServer pid=26) {SAVER} [repeated 7x across cluster]"
    rest = " (Ray deduplicates logs by default. Set RAY_DEDUP_LOGS=0 to disable log deduplication)"
    for end in ("", rest):
        assert len(explain_log(f"(SGLangHttpServer pid=25) {SAVER}\n{repeated}{end}").failures) == 1


def test_rays_figures_without_the_tasks_name() -> None:
    (failure,) = explain_log(RAY).failures
    assert failure.form == "ray.monitor"
    assert "54.86 GiB of 57.60 GiB" in failure.because


@pytest.mark.parametrize(
    "text",
    [
        '"State": {\n "Status": "exited",\n "OOMKilled": false,\n "Dead": false,\n "ExitCode": 137,',
        "Last State: Terminated\n  Reason: Error\n  Exit Code: 137\n  Started: Mon, 13 Nov 2023",
    ],
)
def test_a_container_that_was_not_over_its_limit_is_not_told_to_raise_it(text: str) -> None:
    (failure,) = explain_log(text).failures
    assert failure.form == "container.137"
    assert "does not show that it exceeded" in failure.because
    assert not any("raise" in row.action for row in failure.suggestions)


@pytest.mark.parametrize("text", ["Reason: OOMKilled\n Exit Code: 0", '"OOMKilled": true, "ExitCode": 137'])
def test_a_container_that_was_over_its_limit_is(text: str) -> None:
    (failure,) = explain_log(text).failures
    assert failure.form == "kubernetes.oomkilled"


def test_a_dead_raylet_is_not_a_segmentation_fault() -> None:
    answer = explain_log(
        "(raylet) Raylet is terminated. Termination is unexpected. Possible reasons include: (1) SIGKILL by the user "
        "or system OOM killer, (2) Invalid memory access from Raylet causing SIGSEGV or SIGBUS, (3) Other signals."
    )
    assert [failure.form for failure in answer.failures] == ["ray.raylet"]
    assert answer.notes == ()


def test_a_mapping_that_is_refused_is_one_failure_and_not_a_full_dev_shm() -> None:
    text = "RuntimeError: unable to mmap 280 bytes from file <filename not specified>: Cannot allocate memory (12)"
    (failure,) = explain_log(text).failures
    assert "vm.max_map_count" in failure.suggestions[0].action
    assert "--shm-size" not in str(failure.suggestions)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("[torch_memory_saver.cpp] CUresult error  result=2 file=csrc/torch_memory_saver.cpp func=cu_mem_create",
         "torch_memory_saver.check"),
        ("Decode out of memory happened. #retracted_reqs: 1, #new_token_ratio: 0.6 -> 0.9", "sglang.retracted"),
        ("RuntimeError: Prefill out of memory. Try to lower your batch size.\nTry to allocate 13057 tokens.\n"
         "available_size=12100, evictable_size=0", "sglang.prefill"),
        ("RuntimeError: Not enough memory to handle 16000 total tokens with 4096 prefill tokens.", "tgi.warmup"),
        ("api.py:869] failed (exitcode: -7) local_rank: 1 (pid: 123) of binary: python3", "shm.sigbus"),
        ("command terminated with non-zero exit code: Error executing in Docker Container: 137", "container.137"),
    ],
)  # fmt: skip
def test_other_wordings_of_known_failures(text: str, form: str) -> None:
    (failure,) = explain_log(text).failures
    assert failure.form == form


@pytest.mark.parametrize(
    "text",
    [
        "failed (exitcode: -11) local_rank: 1 (pid: 123) of binary: /usr/bin/python3",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 31 of 64: Resource temporarily unavailable",
        "Error invalid argument at line 393 in file /src/bitsandbytes/csrc/pythonInterface.c",
    ],
)
def test_what_is_not_about_memory_says_so(text: str) -> None:
    answer = explain_log(text)
    assert answer.failures == ()
    assert "not about memory" in answer.notes[0]


TORCH = (
    "torch.OutOfMemoryError: {name} out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of {total} of "
    "which {free} is free. {process}Of the allocated memory {live} is allocated by PyTorch, and {idle} is reserved by "
    "PyTorch but unallocated."
)
FULL_CARD = TORCH.format(
    name="CUDA", asked="1.50 GiB", total="79.11 GiB", free="380.00 MiB", live="76.20 GiB", idle="1.00 GiB", process=""
)
ASYNC = "cuMemAllocAsync failed to allocate {} bytes: RESOURCE_EXHAUSTED: : CUDA_ERROR_OUT_OF_MEMORY: out of memory\n"


@pytest.mark.parametrize(
    ("text", "because", "first"),
    [
        # What is asked for is set beside the device and beside the whole program.
        (ASYNC.format(10**12) + " Reported by CUDA: Free memory/Total memory: 20000000000/85000000000",
         "larger than the whole device", "split it"),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8388608 bytes.\nBufferAssignment OOM Debugging.\n"
         "BufferAssignment stats:\n  parameter allocation: 8.00MiB\n  total allocation: 24.00MiB\n",
         "was already full", "nvidia-smi"),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.\nBufferAssignment OOM Debugging."
         "\nBufferAssignment stats:\n  total allocation: 21.50GiB\n", "needs 21.50 GiB in total", "smaller batch"),
        # The share of a checkpoint that is loaded says what the whole would take.
        (f"{FULL_CARD}\n  File \"/x/transformers/modeling_utils.py\", line 9, in from_pretrained\n"
         "Loading checkpoint shards:  40%|####      | 12/30 [00:20<00:31]", "190.50 GiB", "load_in_8bit"),
        # Smaller segments do not help one large block.
        ("(EngineCore pid=7) ERROR [core.py:11] " + TORCH.format(
            name="HIP", asked="9.00 GiB", total="95.00 GiB", free="14.00 GiB", live="71.00 GiB", idle="90.00 MiB",
            process=""), "at once", "gpu_memory_utilization"),
        # A threshold below Ray's own is what killed.
        ("Memory on the node (IP: 10.0.0.2, ID: ab) where the task (task ID: 4, name=f, pid=5, memory used=9.00GB) was "
         "running was 40.00GB / 64.00GB (0.625), which exceeds the memory usage threshold of 0.6.", "threshold",
         "RAY_memory_usage_threshold=0.95"),
    ],
)  # fmt: skip
def test_numbers_around_a_message_decide_what_comes_first(text: str, because: str, first: str) -> None:
    (failure,) = explain_log(text).failures
    assert because in failure.because
    assert first in failure.suggestions[0].action


def test_memprofs_own_lines_in_a_log_are_read_as_evidence() -> None:
    log = (
        f"[rank1]: {FULL_CARD}\nmemprof [rank 1]: Out by 1.13 GiB in optimizer step, step 1. 38.00 GiB of state\n"
        "  requested  1.50 GiB with 380.00 MiB free\n  allocated  76.20 GiB: Optimizer state 38.00 GiB\n"
        '  change     optim="adamw_8bit" (saves 28.50 GiB, calculated, enough alone)\n'
    )
    (failure,) = explain_log(log).failures
    assert "Out by 1.13 GiB in optimizer step" in failure.because
    assert "Optimizer state 38.00 GiB" in failure.because
    assert failure.suggestions[0].action.startswith('optim="adamw_8bit" (saves 28.50 GiB')
    assert "MemProfCallback" not in str(failure.suggestions)


def test_steps_and_learning_rates_are_no_reason_to_read_a_log_closely() -> None:
    notes: list[str] = []
    steps = "".join(f"step {step} | loss 1.{step} | lr 2.1e-9 | 137 tokens/s\n" for step in range(20_000))
    assert list(regions(steps, notes)) == []
    assert notes == []


WORKER = """(WorkerDict pid=4242, ip=10.0.0.7) Traceback (most recent call last):
(WorkerDict pid=4242, ip=10.0.0.7)   File "/opt/verl/workers/actor/dp_actor.py", line 300, in update_policy
(WorkerDict pid=4242, ip=10.0.0.7)     output = self.actor_module(input_ids=input_ids)
(WorkerDict pid=4242, ip=10.0.0.7) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a \
total capacity of 79.15 GiB of which 1.20 GiB is free. Process 4242 has 77.90 GiB memory in use. Of the allocated \
memory 70.10 GiB is allocated by PyTorch, and 5.00 GiB is reserved by PyTorch but unallocated.
"""


def test_the_actor_that_ran_out_is_named() -> None:
    (failure,) = explain_log(WORKER).failures
    assert (failure.actor, failure.device) == ("WorkerDict pid=4242, ip=10.0.0.7", 0)
    assert failure.headline.verdict.startswith("WorkerDict pid=4242, ip=10.0.0.7: CUDA 0 (line 4): 2.00 GiB")
    (failure,) = explain_log(WORKER.replace("(WorkerDict pid=4242, ip=10.0.0.7) ", "")).failures
    assert failure.actor is None
    assert failure.headline.verdict.startswith("CUDA 0 (line 4): ")


# ---- what an engine took of the GPU, from its own log lines

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB. GPU 6 has a total capacity of 44.53 GiB"
SHARES = table("engines")["share"]


@pytest.mark.parametrize("entry", SHARES, ids=lambda entry: str(entry["words"])[:20])
def test_each_line_is_read_as_its_example_says(entry: dict[str, object]) -> None:
    (share,) = engine_shares(f"one\ntwo\n{entry['example']}\n")
    said = {part: getattr(share, f"{part}_bytes") / 2**30 for part in dict(entry["expect"])}
    assert said == pytest.approx(entry["expect"])
    assert (share.engine, share.line) == (entry["engine"], 3)


def test_the_parts_of_one_engine_are_added_up_beside_the_failure() -> None:
    log = "\n".join(str(entry["example"]) for entry in SHARES if entry["engine"] == "SGLang")
    answer = explain_log(f"{log}\n{OOM}\n")
    assert len(answer.failures) == 1
    assert answer.engines[0].kv_cache_bytes == pytest.approx(52.46 * 2**30)
    # 15.27 + 52.46 + 1.23
    assert any("68.96 GiB together (weights 15.27 GiB, KV cache 52.46 GiB" in note for note in answer.notes)


def test_many_ranks_that_say_the_same_count_once() -> None:
    line = str(SHARES[0]["example"])
    (share,) = engine_shares("\n".join([line] * 64))
    assert share.weights_bytes == round(20.64 * 2**30)


def test_a_log_without_an_engine_has_no_share() -> None:
    assert explain_log(OOM).engines == ()
